"""Folder of an export, on any fsspec filesystem. `config.json` is written last: without it there is no model."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from storage.backends.objects import url_errors
from storage.backends.root import check_slashes
from storage.errors import InputError, StorageError, StorageUnavailable
from tasks.config.credentials import has_credentials, shown_text
from tasks.config.environment import resolve, without_secrets

_LAST = "config.json"
_MARK = ".unfinished-export"  # present from the first write to the last

_WEIGHTS = re.compile(r"(adapter_)?model.*\.safetensors(\.index\.json)?")
_BLOCK = 1 << 20


class Hashed:
    """A file that hashes the bytes written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash = file, xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _BLOCK):
            self._hash.update(view[start : start + _BLOCK])
            self._file.write(view[start : start + _BLOCK])

    @property
    def digest(self) -> str:
        """xxh3-128 of the bytes written."""
        return self._hash.hexdigest()


@dataclass
class ExportFolder:
    shown: str  # its name in messages
    fs: Any
    path: str
    digests: dict[str, str] = field(default_factory=dict)  # xxh3-128 of the files written, by name

    @classmethod
    def new(cls, url: str) -> "ExportFolder":
        """Accept the local folder or URL of a folder that does not exist, is empty, or was left by an interrupted
        export. Raises InputError: it holds something else, has credentials in its URL, or cannot be reached."""
        check_slashes(url, "--to")
        url = url if "://" in url or url.startswith("env:") else str(Path(url).expanduser().absolute())
        if has_credentials(url):
            fact = f"--to {shown_text(url)} has credentials in its URL"
            raise InputError(f"{fact}: give it by reference, as env:NAME, and export NAME")
        place = str(resolve(url, "--to"))
        try:
            fs, path = fsspec.core.url_to_fs(place)
            target = cls(url, fs, path)
            there = target.names()
        except url_errors(place) as error:
            raise InputError(f"--to {url} cannot be used: {without_secrets(str(error))}. Give another folder") from None
        if there and _MARK not in there:
            raise InputError(f"--to {url} is not empty: it holds {there[0]}. Give a new folder, or remove this one")
        return target

    def begin(self) -> None:
        """Mark the folder as unfinished, and remove the weights of an interrupted export."""
        self.write(_MARK, b"")
        del self.digests[_MARK]
        for name in self.names():
            if name.endswith(_LAST) or _WEIGHTS.fullmatch(name):
                self.fs.rm_file(f"{self.path}/{name}")

    def finish(self, config: bytes, last: str = _LAST) -> None:
        """Read everything back, write config.json, or the file in its place, and remove the mark. Raises
        StorageError: a file is damaged."""
        self._check(list(self.digests))
        self.write(last, config)
        self._check([last])
        self.fs.rm_file(f"{self.path}/{_MARK}")

    def names(self) -> list[str]:
        """Sorted names in the folder. Raises NotADirectoryError: it is a file."""
        if not self.fs.exists(self.path):
            return []
        if not self.fs.isdir(self.path):
            raise NotADirectoryError("it is a file")
        return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in self.fs.ls(self.path, detail=False))

    @contextmanager
    def file(self, name: str) -> Iterator[Hashed]:
        """Write a file from beginning to end. Raises StorageUnavailable: it cannot be written."""
        try:
            if isinstance(self.fs, LocalFileSystem):  # one that is made here is this user's alone
                Path(self.path).mkdir(mode=0o700, parents=True, exist_ok=True)
            path = f"{self.path}/{name}"
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self.fs.open(path, "wb") as opened:
                hashed = Hashed(cast(IO[bytes], opened))
                yield hashed
        except OSError as error:
            fact = f"{name} cannot be written to {self.shown}: {error}"
            raise StorageUnavailable(f"{fact}. Correct that, and export again") from error
        self.digests[name] = hashed.digest

    def write(self, name: str, data: bytes) -> None:
        with self.file(name) as file:
            file.write(data)

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            with self.fs.open(f"{self.path}/{name}", "rb") as file:
                found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            if found != self.digests[name]:
                fact = f"{self.shown}/{name} is damaged: xxh3-128 {found} was read, {self.digests[name]} was written"
                raise StorageError(f"{fact}. Export again to another folder")
