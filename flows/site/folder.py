"""The folder of a site: its secret, what runs, logs, and Prefect's home. Only its owner can read it."""

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.errors import InputError

_USER = "admin"
_OWNER_ONLY = 0o600
_FOLDER = 0o700


class RunningProcess(BaseModel):
    """A process that `ratchet up` has started."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: str
    """server or worker."""
    process: int
    """Process id."""
    started: float
    """Its start time, seconds since the epoch, which tells it from a later process with the same id."""
    version: str
    """Version of Ratchet that it runs."""


class SiteRecord(BaseModel):
    """What a site consists of, as the last `ratchet up` left it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = 1
    api: str
    """URL of the server's API."""
    database: str | None = None
    """URL of the server's database, a secret in it by reference; None is SQLite in this folder."""
    processes: tuple[RunningProcess, ...] = ()


@dataclass(frozen=True)
class SiteFolder:
    """A folder that only its owner can read."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> "SiteFolder":
        """The folder, made if it does not exist.

        Raises:
            InputError: it cannot be made, belongs to another user, or others may read it.
        """
        folder = path.expanduser().absolute()
        try:
            folder.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
            found = folder.stat()
        except OSError as error:
            raise InputError(f"the site's folder {folder} cannot be used ({error}): give another --folder") from None
        if found.st_uid != os.getuid():
            raise InputError(f"the site's folder {folder} belongs to user {found.st_uid}: give another --folder")
        if found.st_mode & 0o077:
            raise InputError(f"the site's folder {folder} can be read by others: chmod 700 {folder}")
        return cls(folder)

    @property
    def prefect_home(self) -> Path:
        """Prefect's home: database and settings of this site alone."""
        return self.path / "prefect"

    @property
    def client_file(self) -> Path:
        """What a shell sources to use Prefect's own commands with this site."""
        return self.path / "client.env"

    @property
    def secret_file(self) -> Path:
        """The server's auth string."""
        return self.path / "secret"

    def log(self, role: str) -> Path:
        """Where a process writes what it says."""
        return self.path / f"{role}.log"

    def secret(self) -> str:
        """The server's auth string, generated on first use."""
        if not self.secret_file.exists():
            self.write(self.secret_file, f"{_USER}:{secrets.token_urlsafe(32)}\n")
        return self.secret_file.read_text(encoding="utf-8").strip()

    def record(self) -> SiteRecord | None:
        """What the last `ratchet up` left; None if there is nothing.

        Raises:
            InputError: the record is damaged.
        """
        try:
            return SiteRecord.model_validate_json(self._record_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise InputError(
                f"{self._record_file} is damaged ({error.error_count()} errors): end the processes of the site by "
                "hand, then remove that file"
            ) from None

    def keep(self, record: SiteRecord) -> None:
        """Replace the record."""
        self.write(self._record_file, f"{record.model_dump_json(indent=1)}\n")

    def write(self, file: Path, text: str) -> None:
        """Write a file that only its owner can read; whole or not at all."""
        with tempfile.NamedTemporaryFile("w", dir=self.path, delete=False, encoding="utf-8") as draft:
            draft.write(text)
        Path(draft.name).chmod(_OWNER_ONLY)
        Path(draft.name).replace(file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process changes the site at a time; others wait."""
        with (self.path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @property
    def _record_file(self) -> Path:
        return self.path / "site.json"
