"""Stored runs that tests share: those of its readers read one, others go on with copies of one."""

import shutil
from pathlib import Path

from storage.backends.root import Root, open_root
from tests.small.config import small_config
from tests.small.driving import RUN, driver


def stored_run(folder: Path) -> str:
    """Drive a small run of two iterations below `folder`/runs; returns its name."""
    driver(open_root(str(folder / "runs")), small_config(), folder / "scratch").drive()
    return RUN


def copied(root: Root, folder: Path) -> Root:
    """A root with all that is stored in another one, at `folder`."""
    assert root.folder is not None
    return open_root(str(shutil.copytree(root.folder, folder)))
