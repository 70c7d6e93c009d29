"""Local files: written whole under a temporary name, flushed, then linked, which fails if the name is taken.

Where the filesystem allows, a local file to be stored gets the temporary name itself: nothing is copied.

A rename would silently replace an existing file; `open("xb")` would leave half an object under its name after a crash.
"""

import contextlib
import errno
import itertools
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, BinaryIO

import pyarrow as pa

from storage import kill_points, layout
from storage.backends.backend import Backend, Stored
from storage.errors import StorageUnavailable
from storage.kill_points import Point

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_NOT_LINKED = (*_NO_HARD_LINKS, errno.EXDEV)
# of a network filesystem whose server is away; a failing disk gives EIO too, and is retried to no avail
_TEMPORARY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN, errno.EREMOTEIO, errno.EHOSTDOWN)
# Linux asks for page-cache memory in blocks as large as the write, and from 2 MB on they are hard to find: 86 MB in one
# write took 13 times the CPU time of the same in chunks (ext4, kernel 6.18)
CHUNK_BYTES = 1 << 20
_LATELY_S = 3600.0  # the kernel writes names within a minute
_flushed: set[Path] = set()  # folders whose names this process has flushed, and those of all folders above them
_flushing = threading.Lock()
_WRITABLE = 0o644
_READ_ONLY = 0o444  # `download` links stored files into scratch folders: nothing may write through that name


class LocalFiles(Backend):
    folder: Path
    links, appends = True, True
    repeats_files = False  # what a failed flush did not write of a linked file would be lost silently

    def __init__(self, url: str, _: object = None) -> None:
        self.folder = Path(os.path.abspath(url.split("://", 1)[-1]))
        self.url = f"file://{self.folder}"

    def full(self, key: str) -> Path:
        return self.folder / key

    def put_if_absent(self, key: str, data: memoryview, durable: bool) -> bool:
        target, half = self.full(key), len(data) // 2

        def write(file: BinaryIO) -> None:
            write_in_chunks(file, data[:half])
            kill_points.reached(Point.MID_PART, str(target))
            write_in_chunks(file, data[half:])

        return self._publish(target, write, durable=durable)

    def put_file_if_absent(self, key: str, source: Path) -> bool:
        """The file itself becomes the stored one if it is of this filesystem and has no other name."""
        return self._publish(self.full(key), lambda file: _copy(file, source, self.full(key)), source)

    def copy(self, source: str, key: str) -> None:
        """Give the file another name; a copy where that cannot be: another disk, another user, too many names."""
        origin, target = self.full(source), self.full(key)
        self._make_folders(target.parent)
        try:
            os.link(origin, target)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _NOT_LINKED:
                raise
            self._publish(target, lambda file: _copy(file, origin, target))
        _flush_all_names(target.parent)

    def replace(self, key: str, data: memoryview) -> None:
        folder = self.full(key).parent
        self._make_folders(folder)
        with _temporary(folder, lambda file: write_in_chunks(file, data)) as temporary:
            _flush_names(folder)
            temporary.replace(self.full(key))
        _sync(folder)

    def append(self, key: str, data: bytes) -> None:
        target = self.full(key)
        self._make_folders(target.parent)
        descriptor = os.open(target, os.O_CREAT | os.O_RDONLY, _WRITABLE)
        try:
            os.fchmod(descriptor, _WRITABLE)  # `replace` makes files that cannot be written
        finally:
            os.close(descriptor)
        with target.open("ab", buffering=0) as file:
            file.write(data)

    def read(self, key: str) -> bytes:
        return self.full(key).read_bytes()

    def view(self, key: str) -> pa.Buffer:
        return pa.memory_map(str(self.full(key))).read_buffer()

    def download(self, key: str, target: Path) -> None:
        """Another name for the file, which nothing can write to; a copy on another filesystem."""
        try:
            os.link(self.full(key), target)
        except OSError:
            shutil.copyfile(self.full(key), target)

    def remove(self, key: str) -> None:
        self.full(key).unlink()

    def touch(self, key: str) -> None:
        """Set the time. PermissionError if the file belongs to another user."""
        os.utime(self.full(key))

    def info(self, key: str) -> Stored | None:
        """OSError if it is not known whether the file is there, where `os.path.exists` returns False."""
        try:
            status = self.full(key).stat()
        except FileNotFoundError:
            return None
        return None if stat.S_ISDIR(status.st_mode) else _stored(key, status)

    def stored(self, prefix: str) -> Iterator[Stored]:
        above = f"{self.folder}/"
        for entry in files(self.full(prefix)):
            with contextlib.suppress(FileNotFoundError):  # removed since its name was read
                key = entry.path.removeprefix(above)
                yield _stored(key, entry.stat(follow_symlinks=False))

    def folders(self, prefix: str) -> list[str]:
        return [entry.name for entry in _entries(self.full(prefix)) if entry.is_dir()]

    def remove_empty(self, prefix: str) -> None:
        """Remove a folder and those in it, as far as they hold no file."""
        for entry in _entries(self.full(prefix)):
            if entry.is_dir(follow_symlinks=False):
                self.remove_empty(f"{prefix}/{entry.name}")
        with contextlib.suppress(OSError):  # it holds something, or is gone
            self.full(prefix).rmdir()

    def flush_recent(self, prefix: str) -> None:
        """Flush names in a folder and in its folders: the process that linked them may have died before it did. Of the
        folders in it those count that changed lately: what is older, the kernel has written by itself."""
        folder = self.full(prefix)
        inside = [entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]
        if inside or folder.is_dir():
            _flush_all_names(folder)
        for path in [entry.path for entry in inside if entry.stat().st_mtime > time.time() - _LATELY_S]:
            _flush_all_names(Path(path))

    def is_temporary(self, error: BaseException) -> bool:
        return isinstance(error, OSError) and error.errno in _TEMPORARY

    def to_check(self) -> "LocalFiles":
        nearest = next(one for one in (self.folder, *self.folder.parents) if os.path.lexists(one))
        return LocalFiles(str(nearest))

    def _publish(
        self, target: Path, fill: Callable[[BinaryIO], object], given: Path | None = None, durable: bool = True
    ) -> bool:
        made = False
        if not target.exists():  # raises OSError if that is not known
            self._make_folders(target.parent)
            with _temporary(target.parent, fill, given, durable) as temporary:
                if durable:
                    _flush_names(target.parent)
                made = _link(temporary, target)
        if durable and made:
            _sync(target.parent)
        elif durable:  # the process that linked it may have died before it flushed the name
            _flush_all_names(target.parent)
        return made

    def _make_folders(self, folder: Path) -> None:
        """Make missing folders; a root that is made here, and what is above it, is this user's alone. Folders in it
        follow the umask, so that `chmod` of the root alone shares all of it, or closes it."""
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for made in reversed(missing):
            inside = made != self.folder and made.is_relative_to(self.folder)
            with _flushing:
                if not made.exists():  # else another thread has made it meanwhile, and may have flushed it
                    _flushed.discard(made)  # it may have been there before and been removed since
                    made.mkdir(mode=0o777 if inside else 0o700, exist_ok=True)


def write_in_chunks(file: IO[bytes], data: memoryview) -> None:
    """Write all of `data` in chunks of CHUNK_BYTES bytes; see there for the reason."""
    for start in range(0, len(data), CHUNK_BYTES):
        file.write(data[start : start + CHUNK_BYTES])


def files(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """All files below `folder`, links included; raises OSError for a folder that is there and cannot be read."""
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from files(entry.path)
        else:
            yield entry


def _copy(file: BinaryIO, source: Path, target: Path) -> None:
    with source.open("rb") as reader:
        shutil.copyfileobj(reader, file, CHUNK_BYTES)
    kill_points.reached(Point.MID_PART, str(target))


def _stored(key: str, status: os.stat_result) -> Stored:
    return Stored(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC), status.st_nlink > 1)


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:  # removed since its name was read
        return []


@contextlib.contextmanager
def _temporary(
    folder: Path, fill: Callable[[BinaryIO], object], given: Path | None = None, durable: bool = True
) -> Iterator[Path]:
    path = folder / layout.temporary_name(uuid.uuid4().hex)
    try:
        if given is None or not _take(given, path):
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _READ_ONLY), "wb") as file:
                fill(file)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _take(source: Path, path: Path) -> bool:
    """Give a local file the name `path` too, flushed and read-only; False if it must be copied instead."""
    status = source.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        return False  # it could be written to through its other name
    try:
        os.link(source, path)
        path.chmod(_READ_ONLY)
    except OSError:  # another filesystem, another owner
        path.unlink(missing_ok=True)
        return False
    kill_points.reached(Point.MID_PART, str(path))
    _sync(path)
    return True


def _link(temporary: Path, target: Path) -> bool:
    try:
        os.link(temporary, target)
    except FileExistsError:
        # on a network filesystem the answer to a successful link can be lost, and the link tried again
        return temporary.samefile(target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        raise StorageUnavailable(
            f"the filesystem of {target.parent} has no hard links ({error.strerror}), without which a result cannot "
            "be published exactly once. Choose another folder with --root"
        ) from error
    return True


def _flush_all_names(folder: Path) -> None:
    """Flush the names in `folder`, its own name and those of the folders above it, whichever process made them."""
    _sync(folder)
    _flush_names(folder)


def _flush_names(folder: Path) -> None:
    """Flush the name of a folder and of those above it: a file in a folder that a power cut forgets is lost too. An
    existing folder may have been made by a process that was killed before it flushed the name, so this is done once for
    each folder, up to the mount point."""
    with _flushing:
        done = []
        for one in itertools.chain((folder,), folder.parents):
            if one in _flushed or one.is_mount():
                break
            with contextlib.suppress(PermissionError):  # a folder above the root, not made by us
                _sync(one.parent)
            done.append(one)
        _flushed.update(done)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
