"""One storage root: an fsspec filesystem pinned to a folder, and put-if-absent, the one way to write.

Local files: a temporary file, fsync, then a hard link, which fails if the name is taken (a rename would overwrite).
S3 and compatible: a conditional put (`If-None-Match: *`). Memory: for unit tests of one process only.
"""

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from storage import layout
from storage.errors import InputError, NotCommitted, StorageError, StorageUnavailable

_CONDITIONAL_PUT = ("s3", "s3a")
_ATTEMPTS = 6


@dataclass(frozen=True)
class Root:
    """A folder on a filesystem that can commit. Keys are relative and use '/'."""

    url: str
    fs: Any
    path: str
    protocol: str

    def full(self, key: str) -> str:
        """The filesystem's own path of `key`."""
        return f"{self.path}/{key}"

    def exists(self, key: str) -> bool:
        """Whether `key` is there now."""
        with _explained(self, key):
            return bool(self.fs.exists(self.full(key)))

    def read_bytes(self, key: str) -> bytes:
        """The content of `key`.

        Raises:
            NotCommitted: there is no such key.
        """
        with _explained(self, key):
            try:
                return self.fs.cat_file(self.full(key))
            except FileNotFoundError:
                raise NotCommitted(f"{self.url}/{key} is not there") from None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write `data` under `key` unless the key is taken; whole or not at all, durable on return.

        Returns:
            True if this call wrote it, False if the key was taken (by whatever content: read it back and compare).
        """
        if not data:
            raise StorageError(f"{key}: refusing to write an empty object; conditional puts of empty bodies overwrite")
        with _explained(self, key):
            if self.protocol == "file":
                return _link_if_absent(Path(self.full(key)), data)
            if self.protocol == "memory":
                return _store_if_absent(self.fs, self.full(key), data)
            return _conditional_put(self.fs, self.full(key), data)

    def replace(self, key: str, data: bytes) -> None:
        """Write a derived file for people, replacing what was there. Nothing may decide anything by reading it."""
        with _explained(self, key):
            self.fs.makedirs(self.fs._parent(self.full(key)), exist_ok=True)
            self.fs.pipe_file(self.full(key), data)

    def keys(self, prefix: str) -> list[str]:
        """Keys below `prefix`, sorted: to show and to clean up, never to decide what is committed."""
        with _explained(self, prefix):
            try:
                found = self.fs.find(self.full(prefix))
            except FileNotFoundError:
                return []
        return sorted(name.removeprefix(self.path).lstrip("/") for name in found)

    def download(self, key: str, target: Path) -> None:
        """Bring `key` to the local file `target`; on local storage it is a hard link (parts are write-once)."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with _explained(self, key):
            if self.protocol == "file":
                with contextlib.suppress(OSError):
                    os.link(self.full(key), target)
                    return
            self.fs.get_file(self.full(key), str(target))

    def check_writable(self) -> None:
        """Write and remove a small object.

        Raises:
            StorageUnavailable: that failed.
        """
        key = layout.probe_key(uuid.uuid4().hex)
        self.put_if_absent(key, b"ratchet")
        with _explained(self, key):
            self.fs.rm_file(self.full(key))


def open_root(url: str, *, allow_memory: bool = False, options: dict[str, Any] | None = None) -> Root:
    """Open the storage root at `url` (`file://...`, a path, `s3://bucket/prefix`).

    Raises:
        InputError: the backend cannot publish a manifest exactly once.
    """
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    if protocol in ("file", "local"):
        path = os.path.abspath(url.split("://", 1)[-1])
        return Root(f"file://{path}", fsspec.filesystem("file"), path, "file")
    if protocol == "memory" and not allow_memory:
        raise InputError(
            f"storage root {url!r} is memory of one process: the trainer, the engine and the next start would not "
            "see it. Use file:///some/folder or s3://bucket/prefix"
        )
    if protocol not in (*_CONDITIONAL_PUT, "memory"):
        raise InputError(
            f"storage root {url!r}: backend {protocol!r} is not known to publish a manifest exactly once. "
            "Use file:///some/folder or s3://bucket/prefix"
        )
    # an object written by another process must be seen at once: no listing cache
    fs = fsspec.filesystem(protocol, **({"use_listings_cache": False} if protocol != "memory" else {}), **(options or {}))
    return Root(url.rstrip("/"), fs, fs._strip_protocol(url).rstrip("/"), protocol)


@contextlib.contextmanager
def _explained(root: Root, key: str) -> Iterator[None]:
    """Turn what the operating system or the object store says into an error with a repair."""
    try:
        yield
    except (PermissionError, NotADirectoryError) as error:
        raise StorageUnavailable(
            f"cannot write or read {root.url}/{key}: {error}. Choose a root that this user may write with --root"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageUnavailable(
                f"no space left while writing {root.url}/{key}. Nothing that was committed is lost: free space "
                "and start the same command again"
            ) from error
        raise StorageUnavailable(f"storage failed at {root.url}/{key}: {type(error).__name__}: {error}") from error


def _link_if_absent(target: Path, data: bytes) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        _sync_folder(target.parent)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _store_if_absent(fs: Any, path: str, data: bytes) -> bool:
    if fs.exists(path):
        return False
    fs.makedirs(fs._parent(path), exist_ok=True)
    fs.pipe_file(path, data)
    return True


def _conditional_put(fs: Any, path: str, data: bytes) -> bool:
    # 409 ConditionalRequestConflict reaches us as EBUSY and says "try again"; a lost answer shows as FileExistsError
    for attempt in Retrying(
        retry=retry_if_exception(lambda error: isinstance(error, OSError) and error.errno == errno.EBUSY),
        stop=stop_after_attempt(_ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.05, max=2),
        reraise=True,
    ):
        with attempt:
            try:
                fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
    return True
