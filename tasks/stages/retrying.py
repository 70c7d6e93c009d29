"""Trying a stage again without a person, when a process that computes for it was lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from storage.errors import WorkerLost
from tasks.stages.context import Outcome, Performer, RunContext
from tasks.stages.names import Stage
from tasks.stages.views import Performed, View

BACK_OFF_S = (1.0, 10.0, 60.0)
"""Pauses before the second, third and every later attempt: what ended the process may pass, as memory in use does."""


def persistent(context: RunContext, say: Callable[[str], object]) -> RunContext:
    """A context whose stages are tried again, at most `run.retries` times each, after a process was lost.

    Nothing but `WorkerLost` is tried again: input, rewards, numerics and a store that refuses would fail the same way.
    What lives is kept, `Workers` replace what is dead, and the stage continues from what its attempt before has stored.

    Args:
        say: shows a line to people.
    """
    return replace(context, performer=partial(_Persistent, context, say))


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
                wait = BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)]
                self.say(
                    f"{self.stage} of iteration {iteration}: {lost}. "
                    f"Attempt {attempt + 2} of {retries + 1} begins in {wait:g} s"
                )
                time.sleep(wait)
                # a result that was handed over before the process was lost counts, once it is stored
                self.context.outbox.settle()
        return work()
