"""Local folders that a process works in. Their names identify the owner, so those left by a killed process can go."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.errors import InputError
from storage.ownership.process import Life, Owner, life, this_process

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"ratchet-(?P<place>[0-9a-f]{12})-(?P<process>\d+)-(?P<birth>\d+)-\w+")
_SHORT_NAME = re.compile(r"rt-(?P<place>[0-9a-f]{6})(?P<process>[0-9a-f]+)-(?P<birth>[0-9a-f]+)-\d")
_SHORT = Path("/tmp")
_LONGEST = 107 - len("/session_2026-11-25_14-40-06_123456_1234567/sockets/plasma_store")
"""Characters of a folder for Ray, below which it makes Unix sockets, whose paths have at most 107."""
_OWN = len("/rt-0123453fffff-7fffffffff-0")


@contextmanager
def scratch(memory: bool = False) -> Iterator[Path]:
    """A folder for a block. With `memory` it is in shared memory, where available, for another process of this host."""
    folder = new_folder(memory)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_folder(memory: bool = False) -> Path:
    """A new folder, as `scratch`, which the caller removes."""
    return _new_below(SHARED_MEMORY if memory and SHARED_MEMORY.is_dir() else None)


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for a block, with a path short enough for Ray's sockets. Raises InputError if there is no place."""
    own = this_process("")
    name = f"rt-{_digest(own, 3)}{own.process:x}-{int(own.birth or 0):x}"
    place = short_place()
    folder = next(path for number in range(10) if not (path := place / f"{name}-{number}").exists())
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def short_place() -> Path:
    """The temporary folder; /tmp if its path is too long for Unix sockets. Raises InputError if neither can be used."""
    temporary = Path(tempfile.gettempdir())
    for place in (temporary, _SHORT):
        if len(str(place)) + _OWN <= _LONGEST and os.access(place, os.W_OK | os.X_OK):
            return place
    raise InputError(
        f"temporary folder {temporary}: its path has {len(str(temporary))} characters, and Unix sockets below it need "
        f"one of at most {_LONGEST - _OWN}; /tmp cannot be written either. Set TMPDIR to a folder with a shorter path"
    )


def sweep() -> list[Path]:
    """Remove the folders of dead processes of this machine; returns them."""
    removed: list[Path] = []
    for path in left():
        own = _new_below(path.parent)
        if taken(path, own):  # first, so that no other process takes over what is being removed
            removed.append(path)
        shutil.rmtree(own, ignore_errors=True)
    return removed


def taken(path: Path, folder: Path) -> bool:
    """Give a folder of a dead process the name of an empty one of this process; False if it cannot be had."""
    try:
        path.rename(folder)
    except OSError:  # another process was faster, or it is another user's
        return False
    return True


def left() -> list[Path]:
    parents = {Path(tempfile.gettempdir()), _SHORT, SHARED_MEMORY}
    found = [path for parent in parents for kind in ("ratchet-*", "rt-*") for path in parent.glob(kind)]
    return [path for path in found if _is_left(path)]


def _new_below(parent: Path | None) -> Path:
    own = this_process("")
    return Path(tempfile.mkdtemp(prefix=f"ratchet-{_digest(own, 6)}-{own.process}-{own.birth or 0}-", dir=parent))


def _is_left(path: Path) -> bool:
    own = this_process("")
    for names, digits, base in ((_NAME, 6, 10), (_SHORT_NAME, 3, 16)):
        named = names.fullmatch(path.name)
        if named is not None and named["place"] == _digest(own, digits):
            process, birth = int(named["process"], base), str(int(named["birth"], base))
            return life(Owner(name="", host=own.host, process=process, place=own.place, birth=birth)) is Life.DEAD
    return False  # of another machine, or of a container whose processes are not visible from here


def _digest(owner: Owner, size: int) -> str:
    return hashlib.blake2b(f"{owner.host} {owner.place}".encode(), digest_size=size).hexdigest()
