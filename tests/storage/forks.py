"""Starts of `tests.storage.worker`: each is a process of its own, forked from one that has imported everything."""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


class Forks:
    """One start at a time for each calling thread."""

    def __init__(self) -> None:
        self._servers: dict[int, subprocess.Popen[str]] = {}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`worker.py ARGUMENTS`, to its end."""
        thread = threading.get_ident()
        if thread not in self._servers:
            self._servers[thread] = self._serve()
        server = self._servers[thread]
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            server.stdin.write(f"{json.dumps([folder, *arguments])}\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(arguments, code, out, err)

    def close(self) -> None:
        for server in self._servers.values():
            assert server.stdin is not None
            server.stdin.close()
            server.wait()

    def _serve(self) -> "subprocess.Popen[str]":
        # pyarrow's allocator has a thread, of which Python warns at each fork; it is made for that
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.storage.worker"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT)
