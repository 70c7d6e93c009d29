"""Local files: written whole under a temporary name, flushed, then linked, which fails if the name is taken.

Where the filesystem allows, a local file to be stored gets the temporary name itself: nothing is copied.

A rename would silently replace an existing file; `open("xb")` would leave half an object under its name after a crash.
"""

import contextlib
import errno
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO

from storage import kill_points, layout
from storage.errors import StorageUnavailable
from storage.kill_points import Point

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
# of a network filesystem whose server is away; a failing disk gives EIO too, and is retried to no avail
_TEMPORARY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN, errno.EREMOTEIO, errno.EHOSTDOWN)
# Linux asks for page-cache memory in blocks as large as the write, and from 2 MB on they are hard to find: 86 MB in one
# write took 13 times the CPU time of the same in chunks (ext4, kernel 6.18)
CHUNK_BYTES = 1 << 20
_LATELY_S = 3600.0  # the kernel writes names within a minute
_flushed: set[Path] = set()  # folders whose names this process has flushed, and those of all folders above them
_flushing = threading.Lock()
_private: set[Path] = set()  # storage roots that this process has opened
_WRITABLE = 0o644
_READ_ONLY = 0o444  # `download` links stored files into scratch folders: nothing may write through that name


def keep_private(root: Path) -> None:
    """Let only this user into the folder `root` if this process makes it; one that is there keeps its mode.

    Folders in it follow the umask, so that `chmod` of the root alone shares all of it, or closes it.
    """
    _private.add(root)


def put_if_absent(target: Path, data: memoryview, durable: bool = True) -> bool:
    """Write `data` at `target` unless the name is taken; False if it was taken.

    Args:
        durable: on return the content and its name are on the disk, whichever process wrote them. Otherwise a power
            cut may lose or damage it.
    """

    def write(file: BinaryIO) -> None:
        half = len(data) // 2
        write_in_chunks(file, data[:half])
        kill_points.reached(Point.MID_PART, str(target))
        write_in_chunks(file, data[half:])

    return _publish(target, write, durable=durable)


def put_file_if_absent(target: Path, source: Path) -> bool:
    """Like `put_if_absent`, with a local file that is given away: it may become the stored one.

    Nothing may write to it afterwards.
    """

    def copy(file: BinaryIO) -> None:
        with source.open("rb") as reader:
            shutil.copyfileobj(reader, file, CHUNK_BYTES)
        kill_points.reached(Point.MID_PART, str(target))

    return _publish(target, copy, source)


def replace(target: Path, data: memoryview) -> None:
    """Write `data` at `target` in one step, replacing what was there."""
    _make_folders(target.parent)
    with _temporary(target.parent, lambda file: write_in_chunks(file, data)) as temporary:
        _flush_names(target.parent)
        temporary.replace(target)
    _sync(target.parent)


def append(target: Path, data: bytes) -> None:
    """Add to the end of a file that is not stored for good, in one write; it is made if it is not there."""
    _make_folders(target.parent)
    descriptor = os.open(target, os.O_CREAT | os.O_RDONLY, _WRITABLE)
    try:
        os.fchmod(descriptor, _WRITABLE)  # `replace` makes files that cannot be written
    finally:
        os.close(descriptor)
    with target.open("ab", buffering=0) as file:
        file.write(data)


def make_young(target: Path) -> None:
    """Set a file's time to now. Raises PermissionError if it belongs to another user."""
    os.utime(target)


def write_in_chunks(file: IO[bytes], data: memoryview) -> None:
    """Write all of `data` in chunks of CHUNK_BYTES bytes; see there for the reason."""
    for start in range(0, len(data), CHUNK_BYTES):
        file.write(data[start : start + CHUNK_BYTES])


def exists(target: Path) -> bool:
    """Whether `target` is there; raises OSError if that is not known, where `os.path.exists` returns False."""
    try:
        target.stat()
    except FileNotFoundError:
        return False
    return True


def files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All files below `folder`, links included; raises OSError for a folder that is there and cannot be read."""
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from files(Path(entry.path))
        else:
            yield entry


def folders(folder: Path) -> list[str]:
    """Names of the folders in `folder` and of links to folders, sorted; raises as `files`."""
    return sorted(entry.name for entry in _entries(folder) if entry.is_dir())


def remove_empty(folder: Path) -> None:
    """Remove a folder and those in it, as far as they hold no file."""
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            remove_empty(Path(entry.path))
    with contextlib.suppress(OSError):  # it holds something, or is gone
        folder.rmdir()


def flush_recent(folder: Path) -> None:
    """Flush names in `folder` and in its folders: the process that linked them may have died before it did.

    Of the folders in it those count that changed lately: what is older, the kernel has written by itself.
    """
    inside = [entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]
    if inside or folder.is_dir():
        _flush_all_names(folder)
    for path in [entry.path for entry in inside if entry.stat().st_mtime > time.time() - _LATELY_S]:
        _flush_all_names(Path(path))


def is_temporary(error: BaseException) -> bool:
    """Whether the same operation may succeed later."""
    return isinstance(error, OSError) and error.errno in _TEMPORARY


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:  # removed since its name was read
        return []


def _publish(target: Path, fill: Callable[[BinaryIO], object], given: Path | None = None, durable: bool = True) -> bool:
    if exists(target) or not _create(target, fill, given, durable):
        if durable:  # the process that linked it may have died before it flushed the name
            _flush_all_names(target.parent)
        return False
    if durable:
        _sync(target.parent)
    return True


def _create(target: Path, fill: Callable[[BinaryIO], object], given: Path | None, durable: bool) -> bool:
    _make_folders(target.parent)
    with _temporary(target.parent, fill, given, durable) as temporary:
        if durable:
            _flush_names(target.parent)
        return _link(temporary, target)


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


def _make_folders(folder: Path) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        _flushed.discard(made)  # it may have been there before and been removed since
        inside = any(made != root and made.is_relative_to(root) for root in _private)
        made.mkdir(mode=0o777 if inside else 0o700, exist_ok=True)


def _flush_all_names(folder: Path) -> None:
    """Flush the names in `folder`, its own name and those of the folders above it, whichever process made them."""
    _sync(folder)
    _flush_names(folder)


def _flush_names(folder: Path) -> None:
    """Flush the name of a folder and of those above it: a file in a folder that a power cut forgets is lost too.

    An existing folder may have been made by a process that was killed before it flushed the name, so this is done once
    for each folder, up to the mount point.
    """
    with _flushing:
        done = []
        for one in (folder, *folder.parents):
            if one in _flushed or one.is_mount():
                break
            with contextlib.suppress(PermissionError):  # a folder above the root, not made by us
                _sync(one.parent)
            done.append(one)
        _flushed.update(done)


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
