"""Deployments that drive a run: `train` and `new-run`, and `rerun-stage`, which repeats a finished stage."""

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed
from pydantic import WithJsonSchema

from flows.deployments.attempt import Asked, Count, Minutes, Positive, attempt, fix, form, log_console, owner
from flows.driving import ask_again, is_complete
from flows.run import perform, ready
from flows.views.history import ended_iterations, last_iteration
from flows.views.output import count
from flows.views.progress import Progress
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError, RatchetError
from storage.ids import check_run_name
from storage.ownership.lease import Lease, hold
from storage.revisions import read_revisions
from storage.upkeep.catalog import names
from storage.upkeep.redoing import Wanted
from tasks.config.credentials import shown_setting
from tasks.config.document import completed, load_config, without_blanks
from tasks.config.reference import section_form
from tasks.config.run import RunConfig
from tasks.config.stored import begun_by, changed_config, record_config, stored_config

Table = dict[str, Any]
Tables = dict[str, Table]  # settings by section, as the form gives them
Again = Literal["rollout", "reward", "train", "weight-sync", "evaluate"]

_LIMIT = 1 << 20  # iterations of a run, for a search that halves


def _trained() -> str:
    given: dict[str, Any] = flow_run.get_parameters()
    return f"{given['run']} {'+' if given.get('more') else 'to '}{given.get('more') or given.get('iterations')}"


@form("train", _trained)
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
        more: Continue for this many iterations from where the run is when the flow run gets it, which is what a
            schedule wants. A Retry does not add to them. Give either this or `iterations`.
        iterations: Continue until the run has this many iterations in all.
        config: Absolute path or URL of the TOML file that describes the run. Not needed to continue a run, which then
            keeps the configuration that it was recorded with.
    """

    def work() -> State[Any]:
        check_goal(run, iterations, more)
        resolve = functools.partial(configured, run, root, config=config, settings=settings)
        if more is None:
            return begin(run, root, resolve(iterations or 0))
        return begin_counted(open_root(root), run, more, resolve)

    goal = f"for {count(more or 0, 'more iteration')}" if iterations is None else f"to {iterations} iterations in all"
    described = "as it was recorded" if config is None else f"by {config}"
    changed = f" with {', '.join(map(shown_setting, settings))}" if settings else ""
    will = f"train run {run} {goal}, {described}{changed}"
    return attempt(Asked(run, root, will, places={"config": config}, patience_minutes=patience_minutes), work)


@form("new-run", "{run} new")
def new_run(
    run: str,
    root: str,
    iterations: Positive,
    model: Annotated[Table, WithJsonSchema(section_form("model"))] = {},  # noqa: B006 - never changed
    data: Annotated[Table, WithJsonSchema(section_form("data"))] = {},  # noqa: B006
    train: Annotated[Table, WithJsonSchema(section_form("train"))] = {},  # noqa: B006
    reward: Annotated[Table, WithJsonSchema(section_form("reward"))] = {},  # noqa: B006
    rollout: Annotated[Table, WithJsonSchema(section_form("rollout"))] = {},  # noqa: B006
    evaluate: Annotated[Table, WithJsonSchema(section_form("evaluate"))] = {},  # noqa: B006
    engine: Annotated[Table, WithJsonSchema(section_form("engine"))] = {},  # noqa: B006
    storage: Annotated[Table, WithJsonSchema(section_form("storage"))] = {},  # noqa: B006
    settings: list[str] = [],  # noqa: B006
    patience_minutes: Minutes = 10.0,
) -> State[Any]:
    """Start a run of Ratchet that is described here. It needs a model, data, the longest sequence and a learning rate.

    Deployment `train` continues it, and starts a run that a file describes.

    Args:
        run: Id of the new run. A name that a run has already is refused.
        iterations: Number of iterations; the run can be continued beyond them later.
        model: The model.
        data: The prompts.
        train: Optimizer, policy, layout and limits of the trainer.
        reward: Scoring of responses.
        rollout: Sampling in an iteration.
        evaluate: Answers to held-out prompts.
        engine: The rollout engines.
        storage: Retention of train states.
        settings: Any other settings, each as section.key=value.
    """
    sections: Tables = {
        "model": model, "data": data, "rollout": rollout, "reward": reward,
        "train": train, "evaluate": evaluate, "engine": engine, "storage": storage,
    }  # fmt: skip

    def work() -> State[Any]:
        store, identity = open_root(root), flow_run.get_id()
        check_new(store, check_run_name(run), identity)
        return begin_new(store, run, described(run, iterations, settings, sections), identity)

    will = f"start run {run} and train it for {iterations} iterations"
    return attempt(Asked(run, root, will, patience_minutes=patience_minutes), work)


@form("rerun-stage", "{run}@{iteration}:{stage} again")
def rerun_stage(
    run: str,
    root: str,
    iteration: Count,
    stage: Again,
    reason: str,
    cascade: bool = True,
    new_seeds: bool = False,
    settings: list[str] = [],  # noqa: B006
    patience_minutes: Minutes = 10.0,
) -> State[Any]:
    """Repeat a finished stage of a run. The first result stays readable, and can be chosen again.

    Retry continues the same rerun: nothing is done twice.

    Args:
        iteration: Iteration of the stage.
        stage: Name of the stage. Of iteration 0 only weight-sync and evaluate: the run's beginning stays.
        reason: Reason, which is recorded with the result.
        cascade: Make the result part of the run, and repeat the stages that used the first result, up to the iteration
            that the run has. Without it, the result lies beside the run until deployment `choose` makes it the head.
        new_seeds: Sample with other seeds than the first time, if the stage is a rollout.
        settings: Settings that apply from this stage on, each as section.key=value.
    """

    def work() -> State[Any]:
        identity = flow_run.get_id()
        who = f"flow run {flow_run.get_name()}" if identity else "a flow run"
        wanted = Wanted(iteration, stage, reason, who, cascade, new_seeds, request=identity)
        return repeat(check_run_name(run), root, wanted, settings)

    then = "and what was made from it" if cascade else "beside what was made first"
    will = f"do {stage} of iteration {iteration} of run {run} again, {then}: {reason}"
    retry = "continues the same rerun from what is stored"
    return attempt(Asked(run, root, will, retry, patience_minutes=patience_minutes), work)


def check_goal(run: str, iterations: int | None, more: int | None) -> None:
    """Refuse a name that no run can have, and a goal that is missing or given twice. Raises InputError."""
    check_run_name(run)
    if (iterations is None) == (more is None):
        raise InputError("give either iterations (in all) or more (from here)")


def configured(run: str, root: str, iterations: int, config: str | None, settings: list[str]) -> RunConfig:
    """The configuration of a run: that of a file or the recorded one, with settings replaced. Raises InputError if
    there is none, it cannot be used, or the run trains on stored samples."""
    replaced = [*settings, f"run.iterations={iterations}"]
    if config is not None:
        return load_config(config, replaced)
    before = stored_config(open_root(root), run)
    if before.retrain is not None:
        raise InputError(f"run {run!r} trains on stored samples, so it has as many iterations as those: use `retrain`")
    return changed_config(before, run, replaced)


def described(run: str, iterations: int, settings: list[str], sections: Tables) -> RunConfig:
    """The configuration that the form gives. Raises InputError if it cannot be used, or something is missing."""
    replaced = [*settings, f"run.iterations={iterations}"]
    return completed(without_blanks(sections), replaced, None, f"of the new run {run}")


def check_new(store: Root, run: str, identity: str | None) -> None:
    """Refuse the name of a run that something else than the flow run `identity` has begun, unless nothing was made
    under it yet. Raises InputError if there is such a run."""
    if not store.exists(layout.run_config_key(run)) or not names(store, run, 0).manifests:
        return
    if identity is None or begun_by(store, run) != identity:
        raise InputError(f"run {run!r} exists in {store.url}: give another name, or continue it with `train`")


def begin_new(store: Root, run: str, config: RunConfig, identity: str | None) -> State[Any]:
    """Record the run as this flow run's, and do it. Raises InputError or LeaseHeld if another has begun it."""
    ready(run, store.url, config)
    with hold(store, run, owner()) as lease:
        check_new(store, run, identity)
        record_config(store, run, config, lease, identity)
        return begin(run, store.url, config, held=lease)


def begin_counted(store: Root, run: str, more: int, resolve: Callable[[int], RunConfig]) -> State[Any]:
    """Do `more` iterations, counted under the run's lease, and kept for Retry first. Raises LeaseHeld."""
    ready(run, store.url, resolve(complete_iterations(store, run) + more))  # a refusal leaves no lease behind
    with hold(store, run, owner()) as lease:
        last = complete_iterations(store, run) + more
        config = resolve(last)
        fix(iterations=last, more=None)
        record_config(store, run, config, lease)
        return begin(run, store.url, config, held=lease)


def complete_iterations(store: Root, run: str) -> int:
    """Number of complete iterations of a run, without iteration 0."""
    return max(ended_iterations(store, run, _LIMIT) - 1, 0)


def begin(run: str, root: str, config: RunConfig, held: Lease | None = None) -> State[Any]:
    store = open_root(root)
    idle = is_complete(store, run, config)
    drive(run, root, config, held=held)
    sampled = config.retrain is None
    done = complete_iterations(store, run) if sampled else last_iteration(store, run, config)
    return Completed(message=f"run {run} has {done} iterations{'; nothing was to be done' if idle else ''}")


def repeat(run: str, root: str, wanted: Wanted, settings: Sequence[str] = ()) -> State[Any]:
    asked, config = ask_again(open_root(root), run, wanted, settings)
    drive(run, root, config, one_stage=not asked.cascade)
    number = asked.revision
    if not asked.cascade:
        ways = f"deployment `choose` with revision {number}, or `ratchet choose {run} {number}`"
        head = f"is beside the head: {ways}, makes it so"
    elif number in {choice.revision for choice in read_revisions(open_root(root), run).choices}:
        head = "is the head"
    else:
        return Cancelled(message=f"run {run}: doing {asked} again as revision {number} was withdrawn")
    return Completed(message=f"run {run}: {asked} was done again; revision {number} {head}")


def drive(run: str, root: str, config: RunConfig, *, one_stage: bool = False, held: Lease | None = None) -> None:
    """Do the rest of the run, or only the stage that is to be repeated, as this flow run. Errors name their stage."""
    with Progress(run, config.run.iterations, log_console()) as progress:
        try:
            perform(run, root, config, progress, owner(), one_stage=one_stage, held=held)
        except RatchetError as error:
            error.during = error.during or progress.stage
            raise
