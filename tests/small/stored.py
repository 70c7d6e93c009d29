"""Stored runs that tests share: those of its readers read one, others go on with copies of one."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.backends.root import Root, open_root
from tests.small.config import small_config
from tests.small.driving import RUN, driver


def stored_run(folder: Path) -> str:
    """Drive a small run of two iterations below `folder`/runs; returns its name."""
    driver(open_root(str(folder / "runs")), small_config(), folder / "scratch").drive()
    return RUN


def driven_once(folders: pytest.TempPathFactory, drive: Callable[..., object]) -> Callable[..., Root]:
    """A root with the run that `drive(root, folder, *settings)` makes, by these settings; made once for each. Only
    copies of it are changed."""

    @functools.cache
    def made(*settings: str) -> Root:
        folder = folders.mktemp("driven")
        root = open_root(str(folder / "runs"))
        drive(root, folder, *settings)
        return root

    return made


def copied(root: Root, folder: Path) -> Root:
    """A root with all that is stored in another one, at `folder`."""
    assert root.folder is not None
    return open_root(str(shutil.copytree(root.folder, folder)))
