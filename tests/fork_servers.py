"""Processes that have imported everything and fork on request, one fork at a time for each calling thread."""

import subprocess
import sys
import threading
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


class ForkServers:
    """Servers of one module: each reads a line, executes it in a process of its own, and answers with a line."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._servers: dict[int, subprocess.Popen[str]] = {}

    def ask(self, line: str) -> str:
        """The answer of this thread's server."""
        thread = threading.get_ident()
        if thread not in self._servers:
            self._servers[thread] = self._serve()
        server = self._servers[thread]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{line}\n")
        server.stdin.flush()
        return server.stdout.readline()

    def close(self) -> None:
        for server in self._servers.values():
            assert server.stdin is not None
            server.stdin.close()
            server.wait()

    def _serve(self) -> "subprocess.Popen[str]":
        # pyarrow's allocator has a thread, of which Python warns at each fork; pyarrow is safe to fork
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", self._module]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT)
