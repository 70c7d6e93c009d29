"""A complete stored run, for tests of its readers."""

from pathlib import Path

from storage.backends.root import open_root
from tests.small.config import small_config
from tests.small.driving import RUN, driver


def stored_run(folder: Path) -> str:
    """Drive a small run of two iterations below `folder`/runs; returns its name."""
    driver(open_root(str(folder / "runs")), small_config(), folder / "scratch").drive()
    return RUN
