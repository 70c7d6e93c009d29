"""The door for stores: what a backend does, so that runs can be kept in it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa


class Stored(NamedTuple):
    """An object as a listing shows it."""

    key: str
    bytes: int
    modified: datetime  # time of the last write or touch, by the store's clock (with a time zone)
    shared: bool = False  # True if another key has the same content by a hard link: its removal frees nothing


class Upload(NamedTuple):
    """A multipart upload that was neither finished nor aborted. It costs money and is in no listing of objects."""

    key: str  # key of the object that it was to become
    id: str  # the store's id of it
    started: datetime  # time of its beginning, by the store's clock


class Backend(ABC):
    """A store of objects under keys, such as `run/manifests/000001/train.r0.json`. Subclass it. The first six methods
    are required; the others are made from them, and a store that can do better replaces them. Several threads and
    processes use one store at once, and each sees at once what another has written. `python -m
    storage.backends.conformance URL` checks all of it. A method raises FileNotFoundError for an object that is not
    there, and OSError or one of `failures` if it fails."""

    failures: tuple[type[Exception], ...] = ()  # exceptions of the store's client besides OSError
    links: bool = False  # True if a copy within the store shares the content with its original, and takes no space
    appends: bool = False  # True if the store can add to the end of an object
    repeats_files: bool = True  # True if storing a file may be repeated after it failed
    folder: Path | None = None  # the local folder that holds the objects under their keys, if there is one

    def __init__(self, url: str) -> None:  # noqa: B027 - nothing, by default
        """The store at a URL, whose part before `://` names this class."""

    @abstractmethod
    def put_if_absent(self, key: str, data: memoryview, durable: bool) -> bool:
        """Write an object whole, unless its key is taken; of several writers at once exactly one succeeds. With
        `durable` the object survives a power cut on return, whichever process wrote it. True if this call did."""
        ...

    @abstractmethod
    def replace(self, key: str, data: memoryview) -> None:
        """Write an object whole, in place of what was there. Readers see the former content or the new one."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The content of an object."""
        ...

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove an object."""

    @abstractmethod
    def info(self, key: str) -> Stored | None:
        """Size and time of an object; None if it is not there."""
        ...

    @abstractmethod
    def stored(self, prefix: str) -> Iterable[Stored]:
        """All objects whose keys begin with `prefix` and a slash, in any order; all objects if `prefix` is empty."""
        ...

    def is_temporary(self, error: BaseException) -> bool:
        """True if the same call may succeed later, because the store is busy or away."""
        return isinstance(error, (TimeoutError, ConnectionError))

    def view(self, key: str) -> pa.Buffer:
        """The content of an object, without a copy where the store can."""
        return pa.py_buffer(self.read(key))

    def download(self, key: str, target: Path) -> None:
        """Write the content of an object to a local file."""
        target.write_bytes(self.read(key))

    def put_file_if_absent(self, key: str, source: Path) -> bool:
        """Like `put_if_absent`, durable, with the content of a local file, which is handed over."""
        return self.put_if_absent(key, memoryview(source.read_bytes()), True)

    def copy(self, source: str, key: str) -> None:
        """Copy a write-once object within the store, durably; a taken key holds the same content already."""
        self.put_if_absent(key, memoryview(self.read(source)), True)

    def touch(self, key: str) -> None:
        """Give an object the age of a new one."""
        self.replace(key, memoryview(self.read(key)))

    def append(self, key: str, data: bytes) -> None:
        """Add to the end of an object, which is made if it is not there. Called only if `appends`."""
        raise NotImplementedError

    def folders(self, prefix: str) -> Iterable[str]:
        """Names of the folders one level below `prefix` that hold something."""
        start = f"{prefix}/" if prefix else ""
        below = (one.key.removeprefix(start) for one in self.stored(prefix))
        return {name.partition("/")[0] for name in below if "/" in name}

    def remove_empty(self, prefix: str) -> None:  # noqa: B027 - nothing, by default
        """Remove the folders at and below `prefix` that hold nothing, in a store that has folders."""

    def flush_recent(self, prefix: str) -> None:  # noqa: B027 - nothing, by default
        """Make durable what other processes have published lately in `prefix` and the folders in it."""

    def uploads(self, prefix: str) -> Iterable[Upload]:
        """Multipart uploads below `prefix` that were neither finished nor aborted."""
        return ()

    def abort_upload(self, key: str, upload: str) -> None:  # noqa: B027 - nothing, by default
        """Drop what a multipart upload has stored."""

    def to_check(self) -> "Backend":
        """The place where a probe can be written without making a folder for it."""
        return self
