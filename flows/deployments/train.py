"""Deployment `train`: continue a run to a number of iterations, started by a schedule, a person or a program."""

import functools
import time
from collections.abc import Callable
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed
from pydantic import Field

from flows.deployments.attempt import Asked, attempt, fix
from flows.deployments.lines import log_console
from flows.deployments.stopping import Stopped, stoppable
from flows.driving import is_redoing
from flows.run import perform, ready
from flows.views.history import synced_iterations
from flows.views.progress import Progress
from flows.views.retrained import last_iteration, next_iteration
from storage.backends.root import Root, open_root
from storage.errors import InputError, LeaseHeld, LeaseLost, RatchetError
from storage.ids import check_run_name
from storage.ownership.lease import Lease, hold
from storage.ownership.stopping import ASKED_FOR
from tasks.config.document import apply_overrides, load_config, parse_config
from tasks.config.environment import without_secrets
from tasks.config.run import RunConfig
from tasks.config.stored import record_config, stored_config

_LOOK_S = 5.0
_LIMIT = 1 << 20  # iterations of a run, for a search that halves

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Minutes = Annotated[float, Field(ge=0)]


def named() -> str:
    """Name of a flow run in the UI."""
    given: dict[str, Any] = flow_run.get_parameters()
    return f"{given['run']} {'+' if given.get('more') else 'to '}{given.get('more') or given.get('iterations')}"


@flow(name="train", flow_run_name=named, persist_result=False, validate_parameters=True)
def train(
    run: str,
    root: str,
    more: Positive | None = None,
    iterations: Count | None = None,
    config: str | None = None,
    settings: list[str] = [],  # noqa: B006 - never changed; Prefect shows a default in its form
    patience_minutes: Minutes = 10.0,
) -> State[Any]:
    """Continue a run of Ratchet, or start one that a file describes; deployment `new-run` starts one without a file.

    What is committed is never done again, so Retry continues where the run ended. While another process drives the run,
    this flow run waits, and then ends as Cancelled.

    Args:
        run: Id of the run. A new one is started, an existing one is continued.
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        more: Continue for this many iterations from where the run is when the flow run gets it, which is what a
            schedule wants. A Retry does not add to them. Give either this or `iterations`.
        iterations: Continue until the run has this many iterations in all.
        config: Absolute path or URL of the TOML file that describes the run. Not needed to continue a run, which then
            keeps the configuration that it was recorded with.
        settings: Settings that replace those of the configuration, each as section.key=value.
        patience_minutes: How long to wait for another process that drives this run. After that the flow run ends as
            Cancelled and names that process.
    """
    goal = f"for {more} more iterations" if iterations is None else f"to {iterations} iterations in all"
    described = "as it was recorded" if config is None else f"by {config}"
    changed = f" with {', '.join(settings)}" if settings else ""
    asked = Asked(run, root, f"train run {run} {goal}, {described}{changed}", places={"config": config})
    deadline, say = time.monotonic() + 60 * patience_minutes, get_run_logger().info

    def work() -> State[Any]:
        check_goal(run, iterations, more)
        store, resolve = open_root(root), functools.partial(configured, run, root, config=config, settings=settings)
        if more is None:
            return waiting(run, lambda: begin(run, root, resolve(iterations or 0)), deadline, say)
        return waiting(run, functools.partial(begin_counted, store, run, more, resolve), deadline, say)

    return attempt(asked, work)


def check_goal(run: str, iterations: int | None, more: int | None) -> None:
    """Refuse a name that no run can have, and a goal that is missing or given twice.

    Raises:
        InputError: it says which.
    """
    check_run_name(run)
    if (iterations is None) == (more is None):
        raise InputError("give either iterations (in all) or more (from here)")


def configured(run: str, root: str, iterations: int, config: str | None, settings: list[str]) -> RunConfig:
    """The configuration of a run: that of a file or the recorded one, with settings replaced.

    Raises:
        InputError: it cannot be used, there is none, or the run trains on stored samples.
    """
    replaced = [*settings, f"run.iterations={iterations}"]
    if config is not None:
        return load_config(config, replaced)
    before = stored_config(open_root(root), run)
    if before.retrain is not None:
        raise InputError(f"run {run!r} trains on stored samples, so it has as many iterations as those: use `retrain`")
    document = before.model_dump(mode="json")
    apply_overrides(document, replaced)
    return parse_config(document, f"of run {run} with the given settings")


def begin_counted(store: Root, run: str, more: int, resolve: Callable[[int], RunConfig]) -> State[Any]:
    """Do so many more iterations. They are counted under the run's lease, and kept for Retry before the first begins.

    Raises:
        LeaseHeld: another process drives the run.
        RatchetError: whatever stops the run.
    """
    ready(run, store.url, resolve(complete_iterations(store, run) + more))  # a refusal leaves no lease behind
    with hold(store, run, owner()) as lease:
        last = complete_iterations(store, run) + more
        config = resolve(last)
        fix(iterations=last, more=None)
        record_config(store, run, config, lease)
        return begin(run, store.url, config, held=lease)


def complete_iterations(store: Root, run: str) -> int:
    """How many iterations of a run are complete, without iteration 0."""
    return max(synced_iterations(store, run, _LIMIT) - 1, 0)


def begin(run: str, root: str, config: RunConfig, held: Lease | None = None) -> State[Any]:
    """Do what the run lacks, and say so.

    Raises:
        RatchetError: whatever stops the run.
    """
    store = open_root(root)
    idle = is_complete(store, run, config)
    drive(run, root, config, held=held)
    sampled = config.retrain is None
    done = complete_iterations(store, run) if sampled else last_iteration(store, run, config)
    return Completed(message=f"run {run} has {done} iterations{'; nothing was to be done' if idle else ''}")


def is_complete(store: Root, run: str, config: RunConfig) -> bool:
    """Whether a run has nothing to do under a configuration."""
    left = next_iteration(store, run, config) <= last_iteration(store, run, config)
    return not (left or is_redoing(store, run))


def drive(run: str, root: str, config: RunConfig, *, one_stage: bool = False, held: Lease | None = None) -> None:
    """Do what the run lacks, or only the stage that was asked to be done again, as this flow run.

    Raises:
        RatchetError: whatever stops the run; it names the stage.
    """
    with Progress(run, config.run.iterations, log_console()) as progress:
        try:
            perform(run, root, config, progress, owner(), one_stage=one_stage, held=held)
        except RatchetError as error:
            error.during = error.during or progress.stage
            raise


def owner() -> str:
    """What drives the run, as its lease names it."""
    return f"{ASKED_FOR}{flow_run.get_name()}"


def waiting(run: str, work: Callable[[], State[Any]], deadline: float, say: Callable[[str], object]) -> State[Any]:
    """Do `work` as soon as no other process drives the run; Cancelled if that takes until `deadline`, or is stopped.

    A run that is taken over during the work is another's: it is not taken back.
    """
    try:
        with stoppable():
            return _waiting(work, deadline, say)
    except Stopped:
        return Cancelled(message=f"`ratchet stop {run}` ended it. What was committed is kept: press Retry to continue")


def _waiting(work: Callable[[], State[Any]], deadline: float, say: Callable[[str], object]) -> State[Any]:
    told = False
    while True:
        try:
            return work()
        except LeaseLost as fact:
            return Cancelled(message=without_secrets(str(fact)))
        except LeaseHeld as fact:
            if time.monotonic() >= deadline:
                return Cancelled(message=without_secrets(str(fact)))
            if not told:
                say(f"{without_secrets(str(fact))}. Waiting for it")
                told = True
            time.sleep(_LOOK_S)
