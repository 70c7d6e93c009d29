"""Local folders that a process works in. Their names identify the owner, so those left by a killed process can go."""

import hashlib
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.ownership.process import Life, Owner, life, this_process

SHARED_MEMORY = Path("/dev/shm")
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


def new_folder(memory: bool = False) -> Path:
    """A new folder, as `scratch`, which the caller removes."""
    return _new_below(SHARED_MEMORY if memory and SHARED_MEMORY.is_dir() else None)


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
    """The folders of dead processes of this machine."""
    found = [path for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY) for path in parent.glob("ratchet-*")]
    return [path for path in found if _is_left(path)]


def _new_below(parent: Path | None) -> Path:
    own = this_process("")
    return Path(tempfile.mkdtemp(prefix=f"ratchet-{_short(own)}-{own.process}-{own.birth or 0}-", dir=parent))


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
