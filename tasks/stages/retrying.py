"""Trying a stage again without a person, when a process that computes for it was lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from storage.errors import RatchetError, StorageInterrupted, WorkerLost
from tasks.stages.context import Outcome, Performer, RunContext
from tasks.stages.names import Stage
from tasks.stages.views import Performed, View

BACK_OFF_S = (1.0, 10.0, 60.0)
"""Pauses before the second, third and every later attempt: what ended the process may pass, as memory in use does."""


def persistent(context: RunContext, say: Callable[[str], object]) -> RunContext:
    """A context whose stages are tried again, at most `run.retries` times each, after a process was lost.

    What is stored behind the stages is repeated there as often, also when the store was away for longer than the run
    waits for it. Of a stage nothing but `WorkerLost` is tried again: input, rewards, numerics and a store that refuses
    would fail the same way.
    What lives is kept, `Workers` replace what is dead, and the stage continues from what its attempt before has stored.

    Args:
        say: shows a line to people.
    """
    context.outbox.repeat(partial(_stored_again, context.config.run.retries, say))
    return replace(context, performer=partial(_Persistent, context, say))


def _stored_again(retries: int, say: Callable[[str], object], error: RatchetError, attempts: int) -> float | None:
    """When a job behind the stages is done again: what it needs was written before it began, and is still there."""
    if attempts > retries or not isinstance(error, WorkerLost | StorageInterrupted):
        return None
    wait = _wait(attempts)
    say(f"storing behind the stages: {error}. Attempt {attempts + 1} of {retries + 1} begins in {wait:g} s")
    return wait


def _wait(attempts: int) -> float:
    return BACK_OFF_S[min(attempts, len(BACK_OFF_S)) - 1]


@dataclass(frozen=True)
class _Persistent:
    """The performer of one stage."""

    context: RunContext
    say: Callable[[str], object]
    stage: Stage

    def __call__(self, iteration: int, work: Callable[[], Performed], inputs: tuple[View, ...]) -> Outcome:
        perform: Performer = self.context.performer(self.stage)
        return perform(iteration, partial(self._try, iteration, work), inputs)

    def _try(self, iteration: int, work: Callable[[], Performed]) -> Performed:
        retries = self.context.config.run.retries
        for attempt in range(retries):
            try:
                return work()
            except WorkerLost as lost:
                wait = _wait(attempt + 1)
                self.say(
                    f"{self.stage} of iteration {iteration}: {lost}. "
                    f"Attempt {attempt + 2} of {retries + 1} begins in {wait:g} s"
                )
                time.sleep(wait)
                # a result that was handed over before the process was lost counts, once it is stored
                self.context.outbox.settle()
        return work()
