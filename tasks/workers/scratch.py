"""Folders of this machine: those that a run needs, and those in shared memory, which outlive a killed process.

Its successor takes the latter over."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.errors import InputError
from storage.ownership.scratch import SHARED_MEMORY, left, scratch, short_place, sweep, taken
from tasks.config.environment import prefect_home

__all__ = ["kept_in_memory", "scratch", "sweep"]

_MARK = "mark"
_REPAIR = "to a folder that can be written"


def check_folders() -> None:
    """Refuse folders that a run needs and cannot use: for temporary files, the user's home, and that of Prefect. Raises
    InputError: naming the folder and the variable."""
    try:
        with tempfile.TemporaryFile():
            short_place()
    except OSError as error:
        place = tempfile.tempdir or "of this machine"
        raise InputError(f"temporary folder {place}: {error}. Set TMPDIR {_REPAIR}") from None
    home = Path("~").expanduser()
    if not os.access(home, os.W_OK | os.X_OK):
        raise InputError(f"home folder {home}: it is not there or cannot be written, and libraries keep caches there. "
                         f"Set HOME {_REPAIR}")  # fmt: skip
    prefect = prefect_home()
    try:
        prefect.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=prefect):
            return
    except OSError as error:
        raise InputError(f"Prefect's home folder {prefect}: {error}. Set PREFECT_HOME {_REPAIR}") from None


@contextmanager
def kept_in_memory(mark: str) -> Iterator[Path]:
    """A folder in shared memory for the duration of a block; if a killed process has left one, with what is in it.
    `mark` tells what it is for, such as a run: only a folder that was left with the same mark is taken over."""
    with scratch(memory=True) as folder:
        if not any(_mark_of(one) == mark and taken(one, folder) for one in left()):
            (folder / _MARK).write_text(mark, encoding="utf-8")
        yield folder


def _mark_of(folder: Path) -> str | None:
    """The mark in a folder of this user in shared memory; None if there is none."""
    try:
        ours = folder.parent == SHARED_MEMORY and folder.lstat().st_uid == os.getuid()
        return (folder / _MARK).read_text(encoding="utf-8") if ours else None
    except (FileNotFoundError, NotADirectoryError):
        return None
