"""Deployments `train` and `retrain` over small workers, for a worker's process: the real flow, loop and stages.

Files beside the root say what goes wrong: `fail-STAGE` has the name of an error that its engine or rank raises, and
`slow-rollout` how many seconds a rollout takes longer.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows import run
from flows.deployments.rerun_stage import rerun_stage
from flows.deployments.retrain import retrain
from flows.deployments.train import train
from flows.subflows import Subflows
from storage import errors
from storage.write_behind import Outbox
from tasks.stages.context import RunContext
from tasks.workers.scratch import scratch
from tests.small.here import WorkersHere
from tests.small.workers import SmallEngine, SmallTrainer

__all__ = ["rerun_stage", "retrain", "train"]


@contextmanager
def small_context(name: str, root: Any, config: Any, progress: Any, lease: Any, digest: str) -> Iterator[RunContext]:
    beside = Path(root.path).parent

    def meet(stage: str) -> None:
        slow, fail = beside / f"slow-{stage}", beside / f"fail-{stage}"
        if slow.exists():
            time.sleep(float(slow.read_text()))
        if fail.exists():
            raise vars(errors)[fail.read_text()](f"{stage} does not work here")

    class Engine(SmallEngine):
        def generate(self, *given: Any) -> Any:
            meet("rollout")
            return super().generate(*given)

    class Trainer(SmallTrainer):
        def train_policy(self, *given: Any) -> Any:
            meet("train")
            return super().train_policy(*given)

    workers = WorkersHere(config, Engine, Trainer)
    with scratch() as folder, Subflows(config.run.iterations, progress.advanced) as page, Outbox() as outbox:
        yield RunContext(
            name, root, config, digest, workers, folder, lease, outbox, page.performer,
            announce=progress.begins, page=page,
        )  # fmt: skip


run.open_context = small_context
