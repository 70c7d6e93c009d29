"""`ratchet run` over small workers, whose temporary Prefect server is killed in the middle: `... gone FOLDER`."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from flows import run
from flows.cli import launch
from flows.subflows import Subflows
from flows.views.output import Output
from storage.ownership.scratch import scratch
from storage.write_behind import WriteBehind
from tasks.stages.context import RunContext
from tests.small.config import small_config
from tests.small.here import WorkersHere
from tests.small.workers import SmallTrainer


class Killing(SmallTrainer):
    """Kills the server before the first policy training."""

    def train_policy(self, *given: Any) -> Any:
        for child in psutil.Process().children():
            if "flows.server.process" in child.cmdline():
                child.send_signal(signal.SIGKILL)
                child.wait()
                os.write(1, b"killed\n")
        return super().train_policy(*given)


@contextmanager
def small_context(name: str, root: Any, config: Any, progress: Any, lease: Any, digest: str) -> Iterator[RunContext]:
    workers = WorkersHere(config, trainer=Killing)
    with scratch() as folder, Subflows("a", config.run.iterations, progress.advanced) as page, WriteBehind() as outbox:
        yield RunContext(
            name, root, config, digest, workers, folder, lease, outbox, page.performer,
            announce=progress.begins, page=page,
        )  # fmt: skip


class NoCluster(contextlib.nullcontext[Any]):
    """Replaces Ray, which these workers do not need."""

    def __enter__(self) -> Any:
        return self

    def start(self) -> None:
        pass


if __name__ == "__main__":
    run.open_context, launch.process_cluster = small_context, NoCluster
    order = launch.Order(small_config(), "a", str(Path(sys.argv[1], "runs")), "again")
    code = launch.launch(order, Output())
    sys.stdout.flush()
    os._exit(code)
