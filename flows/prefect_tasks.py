"""Stages as Prefect tasks: the thin layer that makes them visible. The stages themselves do not use Prefect.

Prefect's result cache stays off. Its key would be made from inputs that do not name the iteration, and a hit would skip
a stage silently; the manifest alone decides whether a stage is done.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.stages.context import Performer
from tasks.stages.names import Stage
from tasks.stages.views import Performed, View

REUSED = "Completed (reused)"
"""State of a task run whose stage was committed before."""


@functools.cache
def as_task(stage: Stage) -> Performer:
    """The Prefect task of a stage: called with the iteration, the work and its inputs, it returns the final state.

    The task run is `Failed` if the work raises, and asking the state for its result raises the same error.
    """
    # no tags: Prefect asks the server for a concurrency slot per tag, which costs two seconds a stage
    made = task(
        name=stage.value,
        task_run_name=f"{stage.value}-{{iteration}}",
        cache_policy=NO_CACHE,
        persist_result=False,
    )(_perform)
    return cast(Performer, partial(made, return_state=True))


def _perform(iteration: int, work: Callable[[], Performed], inputs: tuple[View, ...]) -> State[View]:
    # `inputs` draws the arrows of the flow run's graph; `work` already holds them, along with the context, which
    # Prefect must not search for futures
    performed = work()
    manifest = performed.view.manifest
    published = ", to be published once the train state before it is stored" if performed.pending else ""
    stored = (
        f"{len(manifest.parts)} parts" if manifest.parts or manifest.content is None else "whose parts are being stored"
    )
    return Completed(
        name=REUSED if performed.reused else "Completed",
        message=f"{manifest.stage} of iteration {iteration}: manifest {performed.view.digest}, {stored}{published}",
        data=performed.view,
    )
