"""A home for a Prefect server whose database has its tables: making them takes 5 s of processor, so it is done once.

`tests/flows/server` and the PostgreSQL site begin without tables, as a first start does.
"""

import fcntl
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_NAME = "prefect.db"


def once(name: str, factory: "pytest.TempPathFactory", make: Callable[[Path], None]) -> Path:
    """A folder of that name which all processes of this run of the tests share; the first has made what is in it."""
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "made").exists():
            make(shared)
            (shared / "made").touch()
    return shared


def prepared(home: Path, factory: "pytest.TempPathFactory") -> Path:
    """The home, made with a copy of the database that all processes of this run of the tests share."""
    shared = once("prefect-with-tables", factory, _make_tables)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with sqlite3.connect(shared / _NAME) as source, sqlite3.connect(home / _NAME) as copy:
        source.backup(copy)
    return home


def _make_tables(home: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    make = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
    environment |= {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    subprocess.run(make, env=environment, check=True, capture_output=True)
