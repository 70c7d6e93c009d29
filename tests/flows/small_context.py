"""Replacement of `flows.run.open_context` over small workers in this process: the real flow, loop and stages.

Files beside the root choose the failures: `fail-STAGE` has the name of an error that its engine or rank raises, the
message and the number of calls before it. `slow-rollout` has the seconds that a rollout waits at most for its removal.
`calls-STAGE` has a character for each call that was answered.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flows.subflows import Subflows
from storage import errors
from storage.ownership.scratch import scratch
from storage.write_behind import WriteBehind
from tasks.stages.context import RunContext
from tests.small.here import WorkersHere
from tests.small.workers import SmallEngine, SmallTrainer


@contextmanager
def small_context(name: str, root: Any, config: Any, progress: Any, lease: Any, digest: str) -> Iterator[RunContext]:
    beside = root.folder.parent

    def meet(stage: str) -> None:
        slow, fail, calls = (beside / f"{what}-{stage}" for what in ("slow", "fail", "calls"))
        answered = len(calls.read_text()) if calls.exists() else 0
        until = time.monotonic() + float(slow.read_text()) if slow.exists() else 0.0
        while slow.exists() and time.monotonic() < until:
            time.sleep(0.02)
        if fail.exists():
            given, usual = fail.read_text().split("|"), ["StageFailed", f"{stage} does not work here", "0"]
            name, message, after = [*given, *usual[len(given) :]]
            if answered >= int(after):
                raise vars(errors)[name](message)
        calls.write_text("x" * (answered + 1))

    class Engine(SmallEngine):
        def generate(self, *given: Any) -> Any:
            meet("rollout")
            return super().generate(*given)

    class Trainer(SmallTrainer):
        def train_policy(self, *given: Any) -> Any:
            meet("train")
            return super().train_policy(*given)

    workers = WorkersHere(config, Engine, Trainer)
    with scratch() as folder, Subflows(name, config.run.iterations, progress.advanced) as page, WriteBehind() as outbox:
        yield RunContext(
            name, root, config, digest, workers, folder, lease, outbox, page.performer,
            announce=progress.begins, page=page,
        )  # fmt: skip
