"""One storage root: an fsspec filesystem pinned to a folder, and put-if-absent, the only way to publish.

Local files: a temporary file, fsync, then a hard link, which fails if the name is taken (a rename would overwrite).
S3 and compatible: a conditional put (`If-None-Match: *`). Memory: only for unit tests in one process.
"""

import contextlib
import errno
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa

from storage import kill_points, layout
from storage.backends import local, objects
from storage.backends.objects import PATIENCE_SECONDS, Upload
from storage.errors import InputError, NotCommitted, StorageError, StorageInterrupted, StorageUnavailable
from storage.kill_points import Point
from storage.meter import measured

logger = logging.getLogger(__name__)

_CONDITIONAL_PUT = ("s3", "s3a")
CHECK_SECONDS = 10.0  # patience of the check at the start, to report a wrong address soon
_memory_lock = threading.Lock()


@dataclass(frozen=True)
class Stored:
    """An object as a listing shows it."""

    key: str
    bytes: int
    modified: datetime


@dataclass(frozen=True)
class Root:
    """A folder on a filesystem that can commit. Keys are relative and use '/'."""

    url: str
    fs: Any
    path: str
    protocol: str
    patience: float = PATIENCE_SECONDS
    """Seconds for which an operation is retried while the store is busy or does not answer."""

    def patient(self, seconds: float) -> "Root":
        """The same root, with at most that patience."""
        return replace(self, patience=min(seconds, self.patience))

    def waiting(self, seconds: float) -> "Root":
        """The same root, with that patience."""
        return replace(self, patience=seconds)

    def full(self, key: str) -> str:
        """The filesystem's own path of `key`."""
        return f"{self.path}/{key}"

    def exists(self, key: str) -> bool:
        """Whether `key` is there now.

        Raises:
            StorageInterrupted: that is not known, because the store does not answer.
        """
        if self.protocol == "file":
            return self._read(key, lambda: local.exists(Path(self.full(key))))
        return self._read(key, lambda: bool(self.fs.exists(self.full(key))))

    def read_bytes(self, key: str) -> bytes:
        """The content of `key`.

        Raises:
            NotCommitted: there is no such key.
        """
        # otherwise s3fs asks for the size first, to fetch a large object in several requests; a record is small
        options = {"max_concurrency": 1} if self.protocol in _CONDITIONAL_PUT else {}
        with _absence_explained(self, key):
            return self._read(key, lambda: self.fs.cat_file(self.full(key), **options))

    def read_buffer(self, key: str) -> pa.Buffer:
        """The content of `key` without copying it: mapped memory on local storage. Raises as `read_bytes`."""
        with _absence_explained(self, key):
            if self.protocol != "file":
                return pa.py_buffer(self._read(key, lambda: self.fs.cat_file(self.full(key))))
            return self._read(key, lambda: pa.memory_map(self.full(key)).read_buffer())

    def put_if_absent(self, key: str, data: bytes | pa.Buffer, durable: bool = True) -> bool:
        """Write `data` under `key` unless the key is taken; whole or not at all.

        Args:
            durable: on return the object survives a power cut too, even if another process wrote it. False saves a
                flush where there is one to save.

        Returns:
            True if this call wrote it, False if the key was taken (by any content: read it back and compare).
        """
        if not len(memoryview(data)):
            raise StorageError(f"{key}: refusing to write an empty object; conditional puts of empty bodies overwrite")
        with _explained(self, key):
            if self.protocol == "file":
                return self._retried(lambda: local.put_if_absent(Path(self.full(key)), memoryview(data), durable))
            if self.protocol == "memory":
                return _store_if_absent(self.fs, self.full(key), bytes(data))
            kill_points.reached(Point.MID_PART, key)
            return objects.put_if_absent(self.fs, self.full(key), bytes(data), self.patience)

    def put_file_if_absent(self, key: str, source: Path) -> bool:
        """Like `put_if_absent`, with the content of a local file; a large one is streamed.

        The file is handed over: on local storage a hard link may make it the stored one. Never write to it again.
        """
        if not source.stat().st_size:
            raise StorageError(f"{key}: refusing to write an empty object; {source} is empty")
        with _explained(self, key):
            if self.protocol == "file":
                # no retry: what a failed flush did not write of a linked file would be lost silently
                return local.put_file_if_absent(Path(self.full(key)), source)
            if self.protocol == "memory":
                return _store_if_absent(self.fs, self.full(key), source.read_bytes())
            return objects.put_file_if_absent(self.fs, self.full(key), source, self.patience)

    def replace(self, key: str, data: bytes | pa.Buffer) -> None:
        """Write a file, replacing what was there at once: one for people that nothing decides by, or the configuration
        of a run that is corrected under its lease."""
        with _explained(self, key):
            if self.protocol == "file":
                self._retried(lambda: local.replace(Path(self.full(key)), memoryview(data)))
            else:
                self._retried(lambda: self.fs.pipe_file(self.full(key), bytes(data)))

    def append(self, key: str, data: bytes) -> None:
        """Add to the end of a derived file, which is made if it is not there. Only local storage can do that.

        A crash may leave a part of `data` at its end.

        Raises:
            StorageError: the backend cannot append.
        """
        if self.protocol != "file":
            raise StorageError(f"{self.url}/{key}: {self.protocol} cannot append to an object; replace it instead")
        with _explained(self, key):
            self._retried(lambda: local.append(Path(self.full(key)), data))

    def remove(self, key: str) -> None:
        """Remove an object that nothing names; it may already be gone."""
        with contextlib.suppress(FileNotFoundError):
            self._read(key, lambda: self.fs.rm_file(self.full(key)))

    def remove_empty(self, prefix: str) -> None:
        """Remove the folders at and below `prefix` that hold no file; object stores have none."""
        if self.protocol == "file":
            self._read(prefix, lambda: local.remove_empty(Path(self.full(prefix))))

    def make_young(self, key: str) -> bool:
        """Give an object the age of a new one, so that gc counts it as in use; False if that was not possible.

        That is so if the object is gone or belongs to another user: then write it again.
        """
        try:
            self._read(key, lambda: self._make_young(key))
        except (FileNotFoundError, StorageUnavailable):
            return False
        return True

    def info(self, key: str) -> Stored | None:
        """Size and time of the object at `key`, or None if it is not there."""
        try:
            found = self._read(key, lambda: self.fs.info(self.full(key)))
        except FileNotFoundError:
            return None
        return Stored(key, found["size"], _modified(found)) if found["type"] == "file" else None

    def keys(self, prefix: str) -> list[str]:
        """Keys below `prefix`, sorted: for display and cleaning, never to decide what is committed."""
        return [stored.key for stored in self.stored(prefix)]

    def stored(self, prefix: str) -> list[Stored]:
        """Objects below `prefix` with size and time, sorted by key; for the same uses as `keys`."""
        return sorted(self._read(prefix, lambda: list(self._stored(prefix))), key=lambda one: one.key)

    def _stored(self, prefix: str) -> Iterator[Stored]:
        if self.protocol == "file":
            for entry in local.files(Path(self.full(prefix))):
                with contextlib.suppress(FileNotFoundError):  # removed since its name was read
                    status = entry.stat(follow_symlinks=False)
                    modified = datetime.fromtimestamp(status.st_mtime, UTC)
                    yield Stored(entry.path.removeprefix(f"{self.path}/"), status.st_size, modified)
            return
        with contextlib.suppress(FileNotFoundError):
            for name, info in self._find(prefix).items():
                yield Stored(name.removeprefix(self.path).lstrip("/"), info["size"], _modified(info))

    def _find(self, prefix: str) -> dict[str, Any]:
        if prefix and self.protocol in _CONDITIONAL_PUT:
            # as `prefix`: for a path without objects s3fs would ask twice more whether it is an object
            return self.fs.find(self.path, detail=True, prefix=f"{prefix}/")
        return self.fs.find(self.full(prefix), detail=True)

    def folders(self, prefix: str = "") -> list[str]:
        """Names of the folders one level below `prefix` that hold something: for display, never to decide."""
        path = self.full(prefix) if prefix else self.path
        if self.protocol == "file":
            return self._read(prefix, lambda: local.folders(Path(path)))
        try:
            found = self._read(prefix, lambda: self.fs.ls(path, detail=True))
        except FileNotFoundError:
            return []
        return sorted(info["name"].rstrip("/").rsplit("/", 1)[-1] for info in found if info["type"] == "directory")

    def flush_recent(self, prefix: str) -> None:
        """Flush what was published lately in `prefix` and the folders in it: its writer may have been killed before."""
        if self.protocol == "file":
            self._read(prefix, lambda: local.flush_recent(Path(self.full(prefix))))

    def uploads(self, prefix: str) -> list[Upload]:
        """Multipart uploads below `prefix` that were neither finished nor aborted, sorted by key.

        None, with a warning, if the store does not list them, which takes a permission of its own.
        """
        if self.protocol not in _CONDITIONAL_PUT:
            return []
        with _explained(self, prefix):
            try:
                found = list(objects.uploads(self.fs, self.full(prefix).rstrip("/"), self.patience))
            except OSError as error:
                if error.errno != errno.ENOSYS and not isinstance(error, PermissionError):
                    raise
                logger.warning("%s does not list unfinished multipart uploads: %s", self.url, error)
                return []
        return sorted(one._replace(key=one.key.removeprefix(f"{self.path}/")) for one in found)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop what a multipart upload has stored; it may already be finished or gone."""
        with _explained(self, key, reading=True), contextlib.suppress(FileNotFoundError):
            objects.abort_upload(self.fs, self.full(key), upload_id, self.patience)

    def download(self, key: str, target: Path) -> None:
        """Fetch `key` into the local file `target`; on local storage it is a hard link (parts are write-once).

        Raises:
            NotCommitted: there is no such key.
        """
        with _absence_explained(self, key), _explained(self, f"{key} (to {target})", reading=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            if self.protocol == "file":
                with contextlib.suppress(OSError):
                    os.link(self.full(key), target)
                    return
            self._retried(lambda: self.fs.get_file(self.full(key), str(target)), objects.LARGE_ATTEMPTS)

    def check_writable(self) -> None:
        """Write and remove a small object, and check that a second write under its name is refused.

        Raises:
            StorageUnavailable: the root cannot be written, or the second write succeeded.
        """
        key, probed = layout.probe_key(uuid.uuid4().hex), self.existing().patient(CHECK_SECONDS)
        probed.put_if_absent(key, b"ratchet")
        twice = probed.put_if_absent(key, b"Ratchet")
        probed.remove(key)
        if twice:
            raise StorageUnavailable(
                f"{self.url} ignores conditional writes (If-None-Match: *): two writers would overwrite each other. "
                "Use a store that honours them"
            )

    def existing(self) -> "Root":
        """The nearest folder that is there: what is only checked makes none."""
        if self.protocol != "file":
            return self
        folder = Path(self.path)
        return replace(self, path=str(next(one for one in (folder, *folder.parents) if os.path.lexists(one))))

    def _make_young(self, key: str) -> None:
        path = self.full(key)
        if self.protocol == "file":
            return local.make_young(Path(path))
        if self.protocol == "memory":
            return self.fs.cp_file(path, path)
        return objects.make_young(self.fs, path)

    def _read[T](self, key: str, call: Callable[[], T]) -> T:
        with _explained(self, key, reading=True):
            return self._retried(call)

    def _retried[T](self, call: Callable[[], T], attempts: int = 1) -> T:
        return objects.retried(call, _temporary(self), self.patience, attempts)


def open_root(url: str, *, allow_memory: bool = False, options: dict[str, Any] | None = None) -> Root:
    """Open the storage root at `url` (`file://...`, a path, `s3://bucket/prefix`).

    Raises:
        InputError: the backend cannot publish a manifest exactly once.
    """
    protocol = _protocol(url)
    if protocol == "file":
        path = absolute_url(url).removeprefix("file://")
        local.keep_private(Path(path))
        return Root(f"file://{path}", fsspec.filesystem("file"), path, "file")
    if protocol == "memory" and not allow_memory:
        raise InputError(
            f"storage root {url!r} is the memory of one process: the trainer, the engine and the next start cannot "
            "see it. Use file:///some/folder or s3://bucket/prefix"
        )
    if protocol not in (*_CONDITIONAL_PUT, "memory"):
        raise InputError(
            f"storage root {url!r}: backend {protocol!r} is not known to publish a manifest exactly once. "
            "Use file:///some/folder or s3://bucket/prefix"
        )
    # an object written by another process must be seen at once: no listing cache
    remote = {"use_listings_cache": False, "config_kwargs": objects.CLIENT_CONFIG}
    fs = fsspec.filesystem(protocol, **({} if protocol == "memory" else remote) | (options or {}))
    return Root(absolute_url(url), fs, fs._strip_protocol(url).rstrip("/"), protocol)


def absolute_url(url: str) -> str:
    """The URL that the root at `url` has from whatever folder; a relative path is one of the working directory."""
    return f"file://{os.path.abspath(url.split('://', 1)[-1])}" if _protocol(url) == "file" else url.rstrip("/")


def _protocol(url: str) -> str:
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    return "file" if protocol == "local" else protocol


@contextlib.contextmanager
def _absence_explained(root: Root, key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotCommitted(f"{root.url}/{key} is not there") from None


@contextlib.contextmanager
def _explained(root: Root, key: str, *, reading: bool = False) -> Iterator[None]:
    """Turn an error of the operating system or the object store into one with a repair.

    When reading, FileNotFoundError passes through; when writing, it means that the bucket is missing.
    """
    clients = objects.client_errors() if root.protocol in _CONDITIONAL_PUT else ()
    try:
        with measured():
            yield
    except (PermissionError, NotADirectoryError) as error:
        raise StorageUnavailable(
            f"cannot write or read {root.url}/{key}: {error}. Choose a root that this user may write with --root"
        ) from error
    except (OSError, *clients) as error:
        if reading and isinstance(error, FileNotFoundError):
            raise
        if _temporary(root)(error):
            raise StorageInterrupted(
                f"the store does not answer at {root.url}/{key} ({type(error).__name__}: {error}). Nothing that was "
                "committed is lost: start the same command again once it does"
            ) from error
        raise StorageUnavailable(_failure(root, key, error)) from error


def _failure(root: Root, key: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"no space left while writing {root.url}/{key} ({error.strerror}). Nothing that was committed is lost: "
            "free space and start the same command again"
        )
    return f"storage failed at {root.url}/{key}: {type(error).__name__}: {error}"


def _temporary(root: Root) -> Callable[[BaseException], bool]:
    return objects.is_temporary if root.protocol in _CONDITIONAL_PUT else local.is_temporary


def _store_if_absent(fs: Any, path: str, data: bytes) -> bool:
    with _memory_lock:
        if fs.exists(path):
            return False
        fs.makedirs(fs._parent(path), exist_ok=True)
        fs.pipe_file(path, data)
    return True


def _modified(info: dict[str, Any]) -> datetime:
    # local: seconds since the epoch; S3 and memory: a date
    for field in ("mtime", "LastModified", "created"):
        if field in info:
            value = info[field]
            return value if isinstance(value, datetime) else datetime.fromtimestamp(value, UTC)
    return datetime.now(UTC)
