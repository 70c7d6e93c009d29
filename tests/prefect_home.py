"""A home for a Prefect server whose database has its tables: making them takes 5 s of processor, so it is done once.

`tests/flows/server` and the PostgreSQL site begin without tables, as a first start does.
"""

import fcntl
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

_NAME = "prefect.db"


def prepared(home: Path, factory: pytest.TempPathFactory) -> Path:
    """The home, made with a copy of the database that all processes of this run of the tests share."""
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "prefect-with-tables"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "made").exists():
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
            make = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
            environment |= {"PREFECT_HOME": str(shared), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
            subprocess.run(make, env=environment, check=True, capture_output=True)
            (shared / "made").touch()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with sqlite3.connect(shared / _NAME) as source, sqlite3.connect(home / _NAME) as copy:
        source.backup(copy)
    return home
