"""Stages as Prefect tasks: the thin layer that makes them visible. The stages themselves do not use Prefect.

Prefect's result cache stays off. Its key would be made from inputs that do not name the iteration, and a hit would skip
a stage silently; the manifest alone decides whether a stage is done.
"""

import functools
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed

from storage.errors import RatchetError
from tasks.config.environment import without_secrets
from tasks.stages.names import Stage
from tasks.stages.views import Performed, View

REUSED = "Completed (reused)"  # state of a task run whose stage was committed before

COMPUTED = "Computed"
"""State of a task run whose stage is done, but waits for a train state to be stored before it is published."""

Elsewhere = Callable[[BaseException], bool]  # True for an error that another task run shows


def as_task(stage: Stage, iteration: int, work: Callable[[], Performed], inputs: tuple[View, ...]) -> View:
    """Do the work of a stage in a Prefect task of the current flow run. A `Performer`."""
    return outcome(stage_task(stage)(iteration, work, inputs, lambda _error: False))  # each error is its own


def stage_task(stage: Stage) -> Callable[..., State[Any]]:
    """The Prefect task of a stage: called with iteration, work, inputs and an `Elsewhere`, it returns the final state.

    The task run is `Failed` if the work raises. After an error of a task run elsewhere it is `Cancelled`, so that the
    one that failed is the red one.
    """
    return functools.partial(_task(stage.value, _perform), return_state=True)


def outcome(state: State[Any]) -> View:
    """The view that the work of a stage has returned; raises what it raised."""
    if state.is_cancelled() and isinstance(state.data, RatchetError):
        raise state.data
    return state.result()


def show_storing(iteration: int, what: str, published: "Future[None]") -> "State[Any]":
    """A task run that runs until a computed result is durable; it fails, with the reason, if the result is not stored.
    `what` is the stage whose result it is, or what else is done behind the stages."""
    name = "store" if what == Stage.TRAIN else f"publish-{what}" if what in set(Stage) else what
    return _task(name, _wait)(iteration, published, return_state=True)


@functools.cache
def _task(name: str, body: Callable[..., Any]) -> "Task[..., Any]":
    # no tags: Prefect asks the server for a concurrency slot per tag, which costs two seconds a stage
    return task(name=name, task_run_name=f"{name}-{{iteration}}", cache_policy=NO_CACHE, persist_result=False)(body)


def _perform(
    iteration: int, work: Callable[[], Performed], inputs: tuple[View, ...], elsewhere: Elsewhere
) -> State[Any]:
    # `inputs` draws the arrows of the flow run's graph; `work` already holds them, along with the context, which
    # Prefect must not search for futures
    try:
        performed = work()
    except RatchetError as error:
        if not elsewhere(error):
            raise
        return Cancelled(message=f"stopped, because storing failed: {without_secrets(str(error))}", data=error)
    manifest = performed.view.manifest
    name = COMPUTED if performed.pending else REUSED if performed.reused else "Completed"
    published = ", to be published once the train state before it is stored" if performed.pending else ""
    storing = manifest.content is not None and not manifest.parts
    stored = "whose parts are being stored" if storing else f"{len(manifest.parts)} parts"
    text = f"{manifest.stage} of iteration {iteration}: manifest {performed.view.digest}, {stored}{published}"
    return Completed(name=name, message=text, data=performed.view)


def _wait(iteration: int, published: "Future[None]") -> State[Any]:
    try:
        published.result()
    except CancelledError:
        return Cancelled(message="the run was interrupted before this was stored; it is repeated when the run goes on")
    return Completed(message=f"iteration {iteration}: durable")
