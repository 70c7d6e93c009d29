"""Starts of `tests.storage.worker`: each is a process of its own, forked from one that has imported everything."""

import json
import subprocess
import tempfile
from pathlib import Path

from tests.fork_servers import ForkServers


class Forks:
    """One start at a time for each calling thread."""

    def __init__(self) -> None:
        self._servers = ForkServers("tests.storage.worker")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`worker.py ARGUMENTS`, to its end."""
        with tempfile.TemporaryDirectory() as folder:
            code = int(self._servers.ask(json.dumps([folder, *arguments])))
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(arguments, code, out, err)

    def close(self) -> None:
        self._servers.close()
