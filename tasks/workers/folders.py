"""Folders: those that ranks and engines read and write, those that a run needs, and those in shared memory, which
outlive a killed process, and which its successor takes over."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from storage import layout
from storage.backends.root import Root
from storage.digest import value_digest
from storage.errors import InputError
from storage.manifest import Manifest, Part
from storage.ownership.scratch import SHARED_MEMORY, left, scratch, short_place, taken
from storage.parts import PartWriter, materialize
from tasks.config.environment import prefect_home
from trainer_core.protocol import SavedFiles

Wanted = Callable[[str], bool]

_MARK = "mark"
_REPAIR = "to a folder that can be written"


def claim(root: str, run: str) -> str:
    """The name under which the run of a root holds processes, room and folders on a cluster, where runs of other roots
    may have the same name. A root that is moved meanwhile has another one."""
    return f"{run}~{value_digest(root)[: layout.DIGEST_CHARACTERS]}"


def claimed(name: str) -> str:
    """The run that has claimed something under this name, or under one with a purpose after it."""
    return name.partition("~")[0]


def run_folder(run: str) -> Path:
    """A run's own folder on each host, for files in transit."""
    return Path(tempfile.gettempdir(), f"ratchet-of-{os.getuid()}-{run}")


def owned(folder: Path) -> Path:
    """A folder of a run, made if it is not there. Raises InputError: it is another user's, who could change files after
    they were verified."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise InputError(f"{folder} is another user's, and this run needs it: remove it, or choose another --run")
    return folder


class Folders:
    """Folders of this host, for processes that are all here."""

    def fetch(
        self, root: Root, manifest: Manifest, folder: Path, prefix: str = "", wanted: Wanted | None = None
    ) -> Path:
        """`materialize` for every rank and engine, also those that are started later, until `remove`."""
        return materialize(root, manifest, folder, prefix, wanted)

    def storing(
        self, writer: PartWriter, folder: Path, saved: SavedFiles, prefix: str
    ) -> Callable[[], tuple[Part, ...]]:
        """The job that stores what ranks have saved, each host its own files. `prefix` is added to names of parts."""
        return partial(writer.write_files, folder, saved.names, prefix)

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)


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
