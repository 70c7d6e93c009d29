"""Starts of a module's main function: each is a process of its own, forked from one that has imported everything.

The module reads from its input, one JSON list per line, a folder for the output and the arguments, executes each in its
own process and writes the exit code.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.fork_servers import ForkServers


class Forks:
    """One start at a time for each calling thread."""

    def __init__(self, module: str) -> None:
        self._servers = ForkServers(module)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The main function with these arguments, to its end."""
        with tempfile.TemporaryDirectory() as folder:
            code = int(self._servers.ask(json.dumps([folder, *arguments])))
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(arguments, code, out, err)

    def close(self) -> None:
        self._servers.close()


def serve(main: Callable[..., None]) -> None:
    """Execute `main` for each line of the input."""
    for line in sys.stdin:
        sys.stdout.write(f"{_begun(main, *json.loads(line))}\n")
        sys.stdout.flush()


def _begun(main: Callable[..., None], folder: str, *arguments: str) -> int:
    """Execute `main` in a process of its own; returns its exit code, negative for a signal."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 1
    try:
        for name, own in (("in", sys.stdin), ("out", sys.stdout), ("err", sys.stderr)):
            os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_RDWR, 0o644), own.fileno())
        main(*arguments)
        sys.stdout.flush()
        code = 0
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise
    finally:
        os._exit(code)
