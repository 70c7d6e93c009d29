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

_SHARED_MEMORY = Path("/dev/shm")
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
    own = this_process("")
    place = _SHARED_MEMORY if memory and _SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix=f"ratchet-{_short(own)}-{own.process}-{own.birth or 0}-", dir=place))


def sweep() -> list[Path]:
    """Remove the folders of dead processes of this machine; returns them."""
    found = [path for parent in (Path(tempfile.gettempdir()), _SHARED_MEMORY) for path in parent.glob("ratchet-*")]
    left = [path for path in found if _is_left(path)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left


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
