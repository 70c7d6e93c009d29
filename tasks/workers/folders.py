"""Folders that ranks and engines read and write: of this host, or of each host that has some of them."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from storage.backends.root import Root
from storage.manifest import Manifest, Part
from storage.parts import PartWriter, materialize
from trainer_core.protocol import SavedFiles

Wanted = Callable[[str], bool]


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
