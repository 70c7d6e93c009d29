"""`ratchet` commands in processes of their own, forked from one that has imported what they need.

`python -m tests.command_server` reads paths of orders from its input, one per line, and writes exit codes. Importing
Prefect, Ray and the deployments takes 4 s of processor, which each command would pay again.
"""

import gc
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fork_servers import PROJECT, ForkServers

_SERVERS = ForkServers("tests.command_server")
_NEEDED = ("flows.deployments.retrain", "flows.deployments.runs", "flows.deployments.stored", "flows.site.up")


@dataclass(frozen=True)
class Finished:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])


def carry_out(words: Sequence[str], environment: Mapping[str, str], folder: Path = PROJECT) -> Finished:
    """The result of `ratchet` with these words."""
    with TemporaryDirectory() as scratch:
        order, out, err = (Path(scratch) / name for name in ("order", "out", "err"))
        order.write_text(json.dumps({"words": [*words], "environment": dict(environment), "folder": str(folder)}))
        code = int(_SERVERS.ask(str(order)))
        return Finished(code, out.read_text(), err.read_text())


def _begin(file: Path) -> int:
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        order = json.loads(file.read_bytes())
        out, err = file.with_name("out"), file.with_name("err")
        for name, own in ((os.devnull, sys.stdin), (out, sys.stdout), (err, sys.stderr)):
            os.dup2(os.open(name, os.O_CREAT | os.O_RDWR, 0o644), own.fileno())
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        refresh_global_settings_context()  # Prefect has read its settings when it was imported
        sys.argv = ["ratchet", *order["words"]]
        main()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise
    finally:
        os._exit(70)


if __name__ == "__main__":
    from tasks.config.environment import prepare_process

    prepare_process()
    from prefect.context import refresh_global_settings_context

    from flows.__main__ import main
    from tasks.config.code_version import code_version

    for module in _NEEDED:
        importlib.import_module(module)
    code_version()  # computed once for all
    gc.freeze()  # else each process would copy the imported modules when it first collects garbage
    for line in sys.stdin:
        sys.stdout.write(f"{_begin(Path(line.strip()))}\n")
        sys.stdout.flush()
