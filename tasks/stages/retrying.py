"""Further attempts at a stage, without a person, after a process that computes for it was lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from storage.errors import RatchetError, StorageInterrupted, WorkerLost
from tasks.stages.context import RunContext

BACK_OFF_S = (1.0, 10.0, 60.0)
"""Pauses before the second, third and every later attempt: memory pressure, for example, may pass."""


def persistent(context: RunContext, say: Callable[[str], object]) -> RunContext:
    """A context whose stages are tried again, at most `run.retries` times each, after a process was lost. Jobs behind
    the stages are repeated as often, also after an outage of the store that outlasts the run's patience. A stage is
    tried again only after `WorkerLost`: bad input, rewards, numerics and a store that refuses would fail the same way.
    Surviving processes are kept, `Workers` replace the dead ones, and the stage continues from the pieces that its
    previous attempt stored. `say` shows a line to people."""
    context.outbox.repeat(partial(_stored_again, context.config.run.retries, say))
    return replace(context, tries=lambda stage, iteration: _Tries(context, say, stage, iteration))


def _stored_again(retries: int, say: Callable[[str], object], error: RatchetError, attempts: int) -> float | None:
    """Seconds until a failed job behind the stages is repeated; None if it is not. Its input was written before."""
    if attempts > retries or not isinstance(error, WorkerLost | StorageInterrupted):
        return None
    wait = _wait(attempts)
    say(f"storing behind the stages: {error}. Attempt {attempts + 1} of {retries + 1} begins in {wait:g} s")
    return wait


def _wait(attempts: int) -> float:
    return BACK_OFF_S[min(attempts, len(BACK_OFF_S)) - 1]


@dataclass
class _Tries:
    context: RunContext
    say: Callable[[str], object]
    stage: str
    iteration: int
    failed: int = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        retries = self.context.config.run.retries
        if not isinstance(error, WorkerLost) or self.failed >= retries:
            return False
        self.failed += 1
        wait = _wait(self.failed)
        self.say(
            f"{self.stage} of iteration {self.iteration}: {error}. "
            f"Attempt {self.failed + 1} of {retries + 1} begins in {wait:g} s"
        )
        time.sleep(wait)
        self.context.outbox.settle()  # a result that was handed over before the process was lost counts once stored
        return True
