"""The folder of a site, which only its owner can read, and its processes.

Processes start without a terminal, are recognised by id and start time, and end with all they started. A mark in their
environment finds those that nothing recorded."""

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from storage.errors import InputError
from storage.ownership.process import born
from tasks.config.code_version import PROJECT_ROOT, code_version
from tasks.config.environment import site_mark

HOST = "127.0.0.1"  # address of the server

_USER = "admin"
_OWNER_ONLY = 0o600
_FOLDER = 0o700
_GRACE_S = 20.0  # for a flow run to end cleanly: Ray, ranks and engines go with it


class RunningProcess(BaseModel, frozen=True, extra="forbid"):
    role: str  # server or worker
    process: int
    started: str | None  # its `born`, which tells it from a later process with the same id; None: it ended at once
    version: str  # version of Ratchet that it runs


class SiteRecord(BaseModel, frozen=True, extra="forbid"):
    """Processes and addresses of a site after the last `ratchet up`."""

    format_version: int = 1
    api: str
    database: str | None = None
    """URL of the server's database, a secret in it by reference; None is SQLite in this folder."""
    processes: tuple[RunningProcess, ...] = ()


@dataclass(frozen=True)
class SiteFolder:
    path: Path

    @classmethod
    def at(cls, path: Path) -> "SiteFolder":
        """The folder, made if it does not exist. Raises InputError if that fails, or others own it or may read it."""
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
        """Shell file with the settings for Prefect's own commands."""
        return self.path / "client.env"

    @property
    def secret_file(self) -> Path:
        return self.path / "secret"

    def log(self, role: str) -> Path:
        return self.path / f"{role}.log"

    def secret(self) -> str:
        """The server's auth string, generated on first use."""
        if not self.secret_file.exists():
            self.write(self.secret_file, f"{_USER}:{secrets.token_urlsafe(32)}\n")
        return self.secret_file.read_text(encoding="utf-8").strip()

    def record(self) -> SiteRecord | None:
        """The record of the last `ratchet up`; None if there is none. Raises InputError if the record is damaged."""
        try:
            return SiteRecord.model_validate_json(self._record_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            fact = f"{self._record_file} is damaged ({error.error_count()} errors)"
            raise InputError(f"{fact}: end the processes of the site by hand, then remove that file") from None

    def keep(self, record: SiteRecord) -> None:
        self.write(self._record_file, f"{record.model_dump_json(indent=1)}\n")

    def write(self, file: Path, text: str) -> None:
        """Write a file that only its owner can read; whole or not at all."""
        with tempfile.NamedTemporaryFile("w", dir=self.path, delete=False, encoding="utf-8") as draft:
            draft.write(text)
        Path(draft.name).chmod(_OWNER_ONLY)
        Path(draft.name).replace(file)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process changes the site at a time; others wait."""
        with (self.path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @property
    def _record_file(self) -> Path:
        return self.path / "site.json"


def start(role: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> RunningProcess:
    """Start a process that outlives this one; its output is added to `log`."""
    with log.open("ab") as output:
        log.chmod(_OWNER_ONLY)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=PROJECT_ROOT,
            env=dict(environment), start_new_session=True,
        )  # fmt: skip
    return RunningProcess(role=role, process=process.pid, started=born(process.pid), version=code_version())


def find(running: RunningProcess) -> psutil.Process | None:
    """The process, if it still runs; another one with the same id is not it."""
    if running.started is not None and born(running.process) == running.started:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(running.process)
    return None


def strays(folder: Path, recorded: Iterable[RunningProcess], command: str | None = None) -> list[psutil.Process]:
    """Topmost processes of a site that are in no record: `up` was killed before it wrote one, or their parent was.
    Those below a recorded one are not strays. With `command`, only those that have this word in their command line."""
    known = {process.pid for one in recorded if (process := find(one)) is not None}
    marked = {process.pid: process for process in psutil.process_iter() if _is_marked(process, folder)}
    found = []
    for process in marked.values():
        with contextlib.suppress(psutil.Error):
            above = {one.pid for one in process.parents()}
            if process.pid in known or above & (known | marked.keys()) or os.getpid() == process.pid:
                continue
            if command is None or command in process.cmdline():
                found.append(process)
    return found


def _is_marked(process: psutil.Process, folder: Path) -> bool:
    name, value = site_mark(folder)
    with contextlib.suppress(psutil.Error):
        return process.environ().get(name) == value
    return False


def end(running: RunningProcess, grace_s: float = _GRACE_S, starts: bool = False) -> bool:
    """End a process and everything it has started: asked first, killed after `grace_s`. True if it was running.

    One that `starts` others until its end is killed at once: a worker that is asked to end may start a flow run again
    that ended a moment before, and stays alive with it."""
    process = find(running)
    if process is not None:
        started = process.children(recursive=True)
        if starts:
            _kill([process])
        _end(started if starts else [process, *started], grace_s)
    return process is not None


def end_tree(process: psutil.Process, grace_s: float = _GRACE_S) -> None:
    """End a process and everything it has started, as `end` does."""
    _end([process, *process.children(recursive=True)], grace_s)


def _end(processes: Sequence[psutil.Process], grace_s: float) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    _kill(alive)


def kill_tree(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        _kill([process, *process.children(recursive=True)])


def _kill(processes: Sequence[psutil.Process]) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(processes, timeout=_GRACE_S)


def taken(port: int) -> str | None:
    """Reason why no server can have TCP port `port` of the loopback interface; None if one can."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
            return f"is taken by process {one.pid or 'of another user'}"
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "is taken by a connection, which may have ended a minute ago: those get ports above 32767"
        return f"cannot be had: {os.strerror(error.errno or 0)}"
    return None
