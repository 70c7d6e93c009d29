"""Folders in shared memory whose content outlives a killed process: its successor takes them over."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.ownership.scratch import SHARED_MEMORY, left, scratch, sweep, taken

__all__ = ["kept_in_memory", "scratch", "sweep"]

_MARK = "mark"


@contextmanager
def kept_in_memory(mark: str) -> Iterator[Path]:
    """A folder in shared memory for the duration of a block; if a killed process has left one, with what is in it.

    Args:
        mark: what the folder is for, such as a run; only one that was left with the same mark is taken over.
    """
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
