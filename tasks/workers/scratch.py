"""Local folders that a process works in. Their names identify the owner, so those left by a killed process can go."""

import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.ownership.process import Life, Owner, life, this_process

_SHARED_MEMORY = Path("/dev/shm")
_MARK = "mark"
_NAME = re.compile(r"ratchet-(?P<place>[0-9a-f]{12})-(?P<process>\d+)-(?P<birth>\d+)-\w+")


@contextmanager
def scratch(memory: bool = False) -> Iterator[Path]:
    """A folder for the duration of a block.

    Args:
        memory: in shared memory, where available, for what another process on this host reads at once.
    """
    folder = new_folder(memory)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def kept_in_memory(mark: str) -> Iterator[Path]:
    """A folder in shared memory for the duration of a block; if a killed process has left one, with what is in it.

    Args:
        mark: what the folder is for, such as a run; only one that was left with the same mark is taken over.
    """
    with scratch(memory=True) as folder:
        if not any(_mark_of(left) == mark and _taken(left, folder) for left in _left()):
            (folder / _MARK).write_text(mark, encoding="utf-8")
        yield folder


def new_folder(memory: bool = False) -> Path:
    """A new folder, as `scratch`, which the caller removes."""
    return _new_below(_SHARED_MEMORY if memory and _SHARED_MEMORY.is_dir() else None)


def sweep() -> list[Path]:
    """Remove the folders of dead processes of this machine; returns them."""
    removed: list[Path] = []
    for path in _left():
        own = _new_below(path.parent)
        if _taken(path, own):  # first, so that no other process takes over what is being removed
            removed.append(path)
        shutil.rmtree(own, ignore_errors=True)
    return removed


def _new_below(parent: Path | None) -> Path:
    own = this_process("")
    return Path(tempfile.mkdtemp(prefix=f"ratchet-{_short(own)}-{own.process}-{own.birth or 0}-", dir=parent))


def _taken(left: Path, folder: Path) -> bool:
    """Give a folder of a dead process the name of an empty one of this process; False if it cannot be had."""
    try:
        left.rename(folder)
    except OSError:  # another process was faster, or it is another user's
        return False
    return True


def _left() -> list[Path]:
    """The folders of dead processes of this machine."""
    found = [path for parent in (Path(tempfile.gettempdir()), _SHARED_MEMORY) for path in parent.glob("ratchet-*")]
    return [path for path in found if _is_left(path)]


def _mark_of(folder: Path) -> str | None:
    """The mark in a folder of this user in shared memory; None if there is none."""
    try:
        ours = folder.parent == _SHARED_MEMORY and folder.lstat().st_uid == os.getuid()
        return (folder / _MARK).read_text(encoding="utf-8") if ours else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_left(path: Path) -> bool:
    named, own = _NAME.fullmatch(path.name), this_process("")
    if named is None or named["place"] != _short(own):
        return False  # of another machine, or of a container whose processes are not visible from here
    owner = Owner(
        name="", host=socket.gethostname(), process=int(named["process"]), place=own.place, birth=named["birth"]
    )
    return life(owner) is Life.DEAD


def _short(owner: Owner) -> str:
    return hashlib.blake2b(f"{owner.host} {owner.place}".encode(), digest_size=6).hexdigest()
