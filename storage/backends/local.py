"""Local files: written whole under a temporary name, flushed, then linked, which fails if the name is taken.

A local file that is to be stored gets the temporary name itself where the filesystem allows: nothing is copied.

A rename would silently replace what is there; `open("xb")` would leave half an object under its name after a crash.
"""

import contextlib
import errno
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO

from storage import kill_points, layout
from storage.errors import StorageUnavailable
from storage.kill_points import Point

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
# Linux asks for page-cache memory in blocks as large as the write, and from 2 MB on they are hard to find: 86 MB in one
# write took 13 times the CPU time of the same in pieces (ext4, kernel 6.18)
CHUNK_BYTES = 1 << 20
_unflushed: set[Path] = set()  # folders that this process has made, and whose names may not be on the disk yet
_flushing = threading.Lock()
_READ_ONLY = 0o444  # `download` links stored files into scratch folders: nothing may write through that name


def put_if_absent(target: Path, data: memoryview, durable: bool = True) -> bool:
    """Write `data` at `target` unless the name is taken; False if it was taken.

    Args:
        durable: on return it is on the disk, name and all. Otherwise a power cut may take it or damage it.
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
    """Write `data` at `target` in one step, whatever stood there."""
    _make_folders(target.parent)
    with _temporary(target.parent, lambda file: write_in_chunks(file, data)) as temporary:
        _flush_names(target.parent)
        temporary.replace(target)
    _sync(target.parent)


def write_in_chunks(file: IO[bytes], data: memoryview) -> None:
    """Write all of `data` in chunks of CHUNK_BYTES bytes; see there for the reason."""
    for start in range(0, len(data), CHUNK_BYTES):
        file.write(data[start : start + CHUNK_BYTES])


def _publish(target: Path, fill: Callable[[BinaryIO], object], given: Path | None = None, durable: bool = True) -> bool:
    if target.exists():
        return False
    _make_folders(target.parent)
    with _temporary(target.parent, fill, given, durable) as temporary:
        if durable:
            _flush_names(target.parent)
        if not _link(temporary, target):
            return False
    if durable:
        _sync(target.parent)
    return True


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
        return False  # somebody knows it by another name, and may write to it
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
        # over a network filesystem the answer to a link that succeeded can be lost and asked for again
        return temporary.samefile(target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        raise StorageUnavailable(
            f"the filesystem of {target.parent} makes no hard links ({error.strerror}), without which a result cannot "
            "be published exactly once. Choose another folder with --root"
        ) from error
    return True


def _make_folders(folder: Path) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        _unflushed.add(made)  # before any thread can find it
        made.mkdir(exist_ok=True)


def _flush_names(folder: Path) -> None:
    """Flush the names of new folders: a file in a folder that a power cut forgets is lost too.

    Once a file has been flushed this costs little, because a journal has written the folders with it.
    """
    with _flushing:
        for one in (folder, *folder.parents):
            if one in _unflushed:
                _sync(one.parent)
                _unflushed.remove(one)


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
