"""One storage root: a backend, with retries, errors that name the repair, and the cost of waiting counted."""

import contextlib
import errno
import logging
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage import layout
from storage.backends.backend import Backend, Stored, Upload
from storage.backends.local import LocalFiles
from storage.backends.objects import ObjectStore
from storage.backends.own import GIVE, own_backend
from storage.errors import (
    InputError,
    NotCommitted,
    RatchetError,
    StorageError,
    StorageInterrupted,
    StorageUnavailable,
    user_line,
)
from storage.meter import measured

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""Limit on the time for which an operation is retried while the store is busy or does not answer."""

LARGE_ATTEMPTS = 4  # least number of attempts at a transfer, which may itself take longer than PATIENCE_SECONDS

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
_SILENT_S = 5.0  # shorter outages are not logged
CHECK_SECONDS = 10.0  # patience of the check at the start, to report a wrong address soon

OURS: dict[str, Callable[..., Backend]] = {
    "file": LocalFiles, "local": LocalFiles, "s3": ObjectStore, "s3a": ObjectStore,
}  # fmt: skip
"""Our backends, by scheme."""


@dataclass(frozen=True)
class Root:
    """A folder of a store that can commit. Keys are relative and use '/'."""

    url: str
    backend: Backend
    patience: float = PATIENCE_SECONDS
    """Seconds for which an operation is retried while the store is busy or does not answer."""

    @property
    def folder(self) -> Path | None:
        """The local folder of the root; None if it is in another store."""
        return self.backend.folder

    def cap_patience(self, seconds: float) -> "Root":
        return replace(self, patience=min(seconds, self.patience))

    def with_patience(self, seconds: float) -> "Root":
        return replace(self, patience=seconds)

    def exists(self, key: str) -> bool:
        """True if `key` is there now. Raises StorageInterrupted if the store does not answer, so it is not known."""
        return self.info(key) is not None

    def read_bytes(self, key: str) -> bytes:
        """The content of `key`. Raises NotCommitted if there is no such key."""
        with _absence_explained(self, key):
            return self._read(key, lambda: self.backend.read(key))

    def read_buffer(self, key: str) -> pa.Buffer:
        """The content of `key` without copying it: mapped memory on local storage. Raises as `read_bytes`."""
        with _absence_explained(self, key):
            return self._read(key, lambda: self.backend.view(key))

    def put_if_absent(self, key: str, data: bytes | pa.Buffer, durable: bool = True) -> bool:
        """Write `data` under `key` unless the key is taken; whole or not at all. With `durable` the object survives a
        power cut on return, even if another process wrote it; without, a flush is saved where there is one to save.
        Returns True if this call wrote it, False if the key was taken (by any content: read it back and compare)."""
        if not len(memoryview(data)):
            raise StorageError(f"{key}: refusing to write an empty object; conditional puts of empty bodies overwrite")
        with _explained(self, key):
            return self._retried(lambda: self.backend.put_if_absent(key, memoryview(data), durable))

    def put_file_if_absent(self, key: str, source: Path) -> bool:
        """Like `put_if_absent`, with the content of a local file; a large one is streamed. The file is handed over: on
        local storage a hard link may make it the stored one. Never write to it again."""
        if not source.stat().st_size:
            raise StorageError(f"{key}: refusing to write an empty object; {source} is empty")
        with _explained(self, key):
            if not self.backend.repeats_files:
                return self.backend.put_file_if_absent(key, source)
            return self._retried(lambda: self.backend.put_file_if_absent(key, source), LARGE_ATTEMPTS)

    def copy(self, source: str, key: str) -> None:
        """Make `key` a durable copy of a write-once object of this root. Raises NotCommitted if there is none."""
        with _absence_explained(self, source), _explained(self, key, reading=True):
            self._retried(lambda: self.backend.copy(source, key), LARGE_ATTEMPTS)

    def replace(self, key: str, data: bytes | pa.Buffer) -> None:
        """Write a file, replacing what was there at once: one for people that nothing decides by, or the configuration
        of a run that is corrected under its lease."""
        with _explained(self, key):
            self._retried(lambda: self.backend.replace(key, memoryview(data)))

    def append(self, key: str, data: bytes) -> None:
        """Add to the end of a derived file, which is made if it is not there. A crash may leave a part of `data` there.
        Raises StorageError if the backend cannot append."""
        if not self.backend.appends:
            raise StorageError(f"{self.url}/{key}: the store cannot append to an object; replace it instead")
        with _explained(self, key):
            self._retried(lambda: self.backend.append(key, data))

    def remove(self, key: str) -> None:
        """Remove an object that nothing names; it may already be gone."""
        with contextlib.suppress(FileNotFoundError):
            self._read(key, lambda: self.backend.remove(key))

    def remove_empty(self, prefix: str) -> None:
        """Remove the folders at and below `prefix` that hold no file; object stores have none."""
        self._read(prefix, lambda: self.backend.remove_empty(prefix))

    def touch(self, key: str) -> bool:
        """Give an object the age of a new one, so that gc counts it as in use; False if that was not possible. That is
        so if the object is gone or belongs to another user: then write it again."""
        try:
            self._read(key, lambda: self.backend.touch(key))
        except (FileNotFoundError, StorageUnavailable):
            return False
        return True

    def info(self, key: str) -> Stored | None:
        """Size and time of the object at `key`, or None if it is not there."""
        return self._read(key, lambda: self.backend.info(key))

    def keys(self, prefix: str) -> list[str]:
        """Keys below `prefix`, sorted: for display and cleaning, never to decide what is committed."""
        return [stored.key for stored in self.stored(prefix)]

    def stored(self, prefix: str) -> list[Stored]:
        """Objects below `prefix` with size and time, sorted by key; for the same uses as `keys`."""
        return sorted(self._read(prefix, lambda: list(self.backend.stored(prefix))))

    def folders(self, prefix: str = "") -> list[str]:
        """Names of the folders one level below `prefix` that hold something: for display, never to decide."""
        return sorted(self._read(prefix, lambda: list(self.backend.folders(prefix))))

    def flush_recent(self, prefix: str) -> None:
        """Flush what was published lately in `prefix` and the folders in it: its writer may have been killed before."""
        self._read(prefix, lambda: self.backend.flush_recent(prefix))

    def uploads(self, prefix: str) -> list[Upload]:
        """Multipart uploads below `prefix` that were neither finished nor aborted, sorted by key. None, with a warning,
        if the store does not list them: not every store does, and it takes a permission of its own."""
        try:
            with _explained(self, prefix):
                return sorted(self._retried(lambda: list(self.backend.uploads(prefix))))
        except StorageUnavailable as error:
            logger.warning("%s does not list unfinished multipart uploads: %s", self.url, error)
            return []

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop what a multipart upload has stored; it may already be finished or gone."""
        with contextlib.suppress(FileNotFoundError):
            self._read(key, lambda: self.backend.abort_upload(key, upload_id))

    def download(self, key: str, target: Path) -> None:
        """Fetch `key` into the local file `target`; on local storage it is a hard link (parts are write-once). Raises
        NotCommitted if there is no such key."""
        with _absence_explained(self, key), _explained(self, f"{key} (to {target})", reading=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._retried(lambda: self.backend.download(key, target), LARGE_ATTEMPTS)

    def check_writable(self) -> None:
        """Write a small object, and check that it can be read and listed, and that its name is taken. Raises
        StorageUnavailable if the root cannot be written, or does not keep what was written."""
        with self._probed() as (probed, key):
            made, content = probed.put_if_absent(key, b"ratchet"), probed.read_bytes(key)
            if (made, content) != (True, b"ratchet"):
                fact = f"put_if_absent of b'ratchet' returns {made!r}, and {content!r} is there"
                raise self._unusable(f"loses or changes what is written: {fact}")
            if probed.put_if_absent(key, b"Ratchet"):
                fact = "ignores conditional writes (If-None-Match: * on S3)"
                raise self._unusable(f"{fact}: two writers would overwrite each other")
            if len(listed := probed.stored(layout.folder_of(key))) != 1:
                raise self._unusable("lists an object later than it was written: records would be missed")
            for one in (probed.info(key), *listed):
                if not isinstance(one, Stored) or one[:2] != (key, len(content)) or not _has_zone(one.modified):
                    expected = f"Stored({key!r}, {len(content)}, a time with its zone)"
                    raise self._unusable(f"describes an object as {one!r}, not as {expected}")

    def seconds_ahead(self) -> float:
        """Seconds by which the store's clock is ahead of this machine's, negative if behind; 0 if that is not known.
        Cleaning compares the ages of objects, which are times of the store, with this machine's clock. Raises
        StorageUnavailable if the root cannot be written."""
        with self._probed() as (probed, key):
            before = datetime.now(UTC)
            probed.put_if_absent(key, b"ratchet")
            written = probed.info(key)
            after = datetime.now(UTC)
        if written is None:
            raise self._unusable("loses what is written: a write succeeded and nothing is there")
        if written.modified < before:
            return (written.modified - before).total_seconds()
        return max((written.modified - after).total_seconds(), 0.0)

    @contextlib.contextmanager
    def _probed(self) -> "Iterator[tuple[Root, str]]":
        """The root with little patience, and a key that is removed after the block."""
        key = layout.probe_key(uuid.uuid4().hex)
        probed = replace(self, backend=self.backend.to_check()).cap_patience(CHECK_SECONDS)
        try:
            yield probed, key
        except StorageError as error:
            with contextlib.suppress(StorageError):  # a store that is away is not waited for twice
                probed.cap_patience(0).remove(key)
            if isinstance(error, NotCommitted):
                raise self._unusable("loses what is written: a write succeeded and nothing is there") from None
            raise
        probed.remove(key)
        probed.remove_empty(layout.folder_of(key))

    def _unusable(self, why: str) -> StorageUnavailable:
        return StorageUnavailable(f"{self.url} ({type(self.backend).__name__}) {why}. Use a store that does not")

    def _read[T](self, key: str, call: Callable[[], T]) -> T:
        with _explained(self, key, reading=True):
            return self._retried(call)

    def _retried[T](self, call: Callable[[], T], attempts: int = 1) -> T:
        """The result of `call`, repeated with growing random pauses while the store is busy or away."""
        begun, longest, said = time.monotonic(), _SHORTEST_PAUSE, False
        while True:
            try:
                return call()
            except Exception as error:
                attempts, waited, pause = attempts - 1, time.monotonic() - begun, random.uniform(0, longest)
                if not self.backend.is_temporary(error) or (attempts <= 0 and waited + pause >= self.patience):
                    raise
                if waited >= _SILENT_S and not said:
                    said, name = True, type(error).__name__
                    logger.warning("the store does not answer (%s): waiting for it, up to %g s", name, self.patience)
            time.sleep(pause)
            longest = min(2 * longest, _LONGEST_PAUSE)


def _has_zone(time: object) -> bool:
    return isinstance(time, datetime) and time.tzinfo is not None


@contextlib.contextmanager
def _absence_explained(root: Root, key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotCommitted(f"{root.url}/{key} is not there") from None


@contextlib.contextmanager
def _explained(root: Root, key: str, *, reading: bool = False) -> Iterator[None]:
    """Turn an error of the operating system or the store into one with a repair. When reading, FileNotFoundError passes
    through; when writing, it means that the bucket is missing."""
    try:
        with measured():
            yield
    except (OSError, *root.backend.failures) as error:
        if reading and isinstance(error, FileNotFoundError):
            raise
        number = error.errno if isinstance(error, OSError) else None
        if isinstance(error, PermissionError | NotADirectoryError) or number == errno.EROFS:
            fact = f"cannot write or read {root.url}/{key}: {error}"
            raise StorageUnavailable(f"{fact}. Choose a root that this user may write with --root") from error
        if root.backend.is_temporary(error):
            raise StorageInterrupted(
                f"the store does not answer at {root.url}/{key} ({type(error).__name__}: {error}). Nothing that was "
                "committed is lost: start the same command again once it does"
            ) from error
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageUnavailable(
                f"no space left while writing {root.url}/{key} ({os.strerror(number)}). Nothing that was committed is "
                "lost: free space and start the same command again"
            ) from error
        fact = f"storage failed at {root.url}/{key}: {type(error).__name__}: {error}"
        raise StorageUnavailable(f"{fact}. Correct --root, or what this user may do there") from error
    except Exception as error:
        if isinstance(error, RatchetError) or type(root.backend) in OURS.values():
            raise
        fact = f"the backend of {root.url} fails at {key}: {type(error).__name__}: {error}{user_line(error)}"
        raise StorageUnavailable(
            f"{fact}. Correct it: a backend raises FileNotFoundError for an object that is not there, and OSError or "
            "one of its `failures` if it fails"
        ) from error


def open_root(url: str, *, options: dict[str, Any] | None = None) -> Root:
    """Open the storage root at `url`: a path, `file://...`, `s3://bucket/prefix`, or BACKEND://PLACE. BACKEND is an
    entry point of the group `ratchet.stores`, or a class, called with the whole URL, as `file.py:CLASS` or
    `package.module:CLASS`. `options` are those of the client of an object store. Raises InputError if there is none."""
    check_slashes(url, "storage root")
    given, url = url, absolute_url(url)
    scheme, _, place = url.partition("://")
    if not given.strip() or re.match(r"[^:]+\.py:\w+(?!.*://)", given) or (not place.strip("/") and scheme != "file"):
        raise InputError(f"storage root {given!r} names no place in the store. {GIVE}")
    if scheme in OURS:
        return Root(url, OURS[scheme](url, options))
    return Root(url, own_backend(scheme, url, OURS))


def check_slashes(url: str, what: str) -> None:
    """Raises InputError: a URL lacks a slash, and would be taken for the path of a folder."""
    if found := re.match(r"(file|local|s3a?|gs|az|hf|https?):/?(?!/)", url):
        raise InputError(f"{what} {url!r} lacks a slash: a URL has two after its colon. Write {found[1]}://...")


def absolute_url(url: str) -> str:
    """The URL that the root at `url` has from whatever folder; a relative path is one of the working directory."""
    scheme, there, place = url.partition("://")
    if not there or scheme in ("file", "local"):
        home = not there and (url == "~" or url.startswith("~/"))
        return f"file://{os.path.abspath(place if there else f'{Path.home()}{url[1:]}' if home else url)}"
    file, colon, name = scheme.rpartition(":")
    return f"{os.path.abspath(file)}:{name}://{place}" if colon and file.endswith(".py") else url.rstrip("/")
