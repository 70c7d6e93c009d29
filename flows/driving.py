"""Driving a run under its lease, from where its manifests end to the last iteration; without Prefect and Ray."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from flows import iteration as sampling
from flows import retraining
from flows.views.history import read_record
from flows.views.progress import Progress
from flows.views.retrained import last_iteration, next_iteration, workflow_of
from storage import layout
from storage.backends.root import Root
from storage.errors import Overtaken
from storage.ownership.lease import Lease, hold
from storage.revisions import Rerun, Revisions, keep_copies, read_revisions
from storage.upkeep.catalog import names
from storage.upkeep.redoing import Wanted, ask, choose, unfinished
from storage.upkeep.retention import Retention, catch_up, give_up
from storage.upkeep.shared import SharedParts
from tasks.config.document import parse_config
from tasks.config.identity import with_settings
from tasks.config.run import RunConfig
from tasks.config.stored import corrections, documents, read_config, record_config
from tasks.stages.context import RunContext
from tasks.stages.names import WORKFLOW, Stage
from tasks.stages.retrying import persistent

Opener = Callable[[Lease, str], AbstractContextManager[RunContext]]
"""Makes the context that stages work in from the lease and the identity of the recorded configuration; what it starts
ends with the block."""


def complete(
    name: str,
    root: Root,
    config: RunConfig,
    progress: Progress,
    opener: Opener,
    owner: str = "ratchet run",
    held: Lease | None = None,
) -> None:
    """Record the configuration and do the missing part of a run, both under its lease.

    If the process that drove the run before still publishes a stage, with another result, that result counts, and the
    run continues from it.

    Args:
        owner: what drives the run, for people.
        held: the run's lease, if the caller holds it already and has recorded the configuration under it.
    """
    while next_iteration(root, name, config) <= last_iteration(root, name, config) or is_redoing(root, name):
        with _driven(root, name, config, progress, opener, owner, held) as context:
            settled = finish_rerun(context, progress)
            advance(settled, progress, next_iteration(root, name, config))


def rerun(root: Root, name: str, wanted: Wanted) -> Rerun:
    """Record that a finished stage is to be done again; `complete` or `redo_stage` then does it. Raises as `ask`."""
    with hold(root, name, "ratchet rerun") as lease:
        return ask(root, WORKFLOW, name, wanted, lease)


def redo_stage(
    name: str,
    root: Root,
    config: RunConfig,
    progress: Progress,
    opener: Opener,
    owner: str = "ratchet run",
    held: Lease | None = None,
) -> None:
    """Only finish the rerun that was asked for, if it is not finished; the iterations are left as they are."""
    while is_redoing(root, name):
        with _driven(root, name, config, progress, opener, owner, held) as context:
            finish_rerun(context, progress)


@contextmanager
def _driven(
    root: Root, name: str, config: RunConfig, progress: Progress, opener: Opener, owner: str, held: Lease | None
) -> Iterator[RunContext]:
    """The context of the head, under the run's lease. A result that another process published meanwhile counts."""
    try:
        with hold(root, name, owner) if held is None else nullcontext(held) as lease:
            keep_copies(root, name)
            names(root, name)  # refuses to go on where the record of a rerun is lost
            digest = _recorded(root, name, config, progress, lease) if held is None else read_config(root, name).digest
            with opener(lease, digest) as context:
                yield on_head(persistent(context, progress.say))
    except Overtaken as fact:
        progress.say(f"{fact}")


def _recorded(root: Root, name: str, config: RunConfig, progress: Progress, lease: Lease) -> str:
    there = root.exists(layout.run_config_key(name))
    for line in corrections(root, name, config) if there else []:
        progress.say(f"corrected, since nothing was made from it yet: {line}")
    return record_config(root, name, config, lease)


def is_redoing(root: Root, name: str) -> bool:
    """Whether a finished stage was asked to be done again, and that is not finished."""
    return unfinished(root, name, read_revisions(root, name)) is not None


def on_head(context: RunContext) -> RunContext:
    """The context that works on the run's head as it is now."""
    return _on(context, read_revisions(context.root, context.run))


def _on(context: RunContext, revisions: Revisions) -> RunContext:
    """The context that works on the revision that `revisions` is seen from, under its settings."""
    stored = read_config(context.root, context.run, revisions)
    config, settings = context.config, revisions.settings()
    if settings:
        given = with_settings(config.model_dump(mode="json"), settings)
        config = parse_config(given, f"of revision {revisions.current} of run {context.run}")
    every = documents(context.root, context.run, revisions)
    return replace(context, config=config, config_digest=stored.digest, revisions=revisions, documents=every)


def finish_rerun(context: RunContext, progress: Progress) -> RunContext:
    """Do the stage that was asked to be done again, if it is not done, and choose the result if it cascades.

    Returns:
        The context of the head that there is then.
    """
    root, run = context.root, context.run
    rerun = unfinished(root, run, context.revisions)
    if rerun is None:
        return context
    progress.say(
        f"revision {rerun.revision}: {rerun} is done again ({rerun.reason}); until that is finished, "
        f"`ratchet choose {run} {context.revisions.head} --reason TEXT` withdraws it"
    )
    with context.page.iteration(rerun.iteration):
        sampling.redo(_on(context, context.revisions.seen(rerun.revision)), rerun.iteration, Stage(rerun.stage))
    context.outbox.settle()
    if rerun.cascade:
        assert context.fence is not None
        choose(root, WORKFLOW, run, rerun.revision, rerun.reason, rerun.asked_by, context.fence)
        progress.say(f"revision {rerun.revision} is the head")
    else:
        progress.say(
            f"revision {rerun.revision} is beside the head: `ratchet choose {run} {rerun.revision}` changes it"
        )
    return on_head(context)


def advance(context: RunContext, progress: Progress, first: int) -> None:
    """Do the iterations from `first` to the last; their results are durable on return."""
    shared = SharedParts(context.root, context.run)
    tidy(context, shared)  # before a stage can find an old part and use it
    if context.config.retrain is None:
        _loop(context, progress, shared, first, sampling.begin, sampling.iterate, sampling.position_after)
    else:
        _loop(context, progress, shared, first, retraining.begin, retraining.iterate, retraining.position_after)
    context.outbox.settle()


def _loop[P](
    context: RunContext,
    progress: Progress,
    shared: SharedParts,
    first: int,
    begin: Callable[[RunContext], P],
    iterate: Callable[[RunContext, int, P], P],
    position_after: Callable[[RunContext, int], P],
) -> None:
    position = position_after(context, first - 1) if first else None
    if position is None:
        with context.page.iteration(0):
            position = begin(context)
            conclude(context, progress, shared, 0)
    last = last_iteration(context.root, context.run, context.config)
    progress.expect(last)
    for iteration in range(max(first, 1), last + 1):
        with context.page.iteration(iteration):
            position = iterate(context, iteration, position)
            conclude(context, progress, shared, iteration)


def conclude(context: RunContext, progress: Progress, shared: SharedParts, iteration: int) -> None:
    """Report an iteration once it is published completely, and delete the train state that is no longer kept.

    These are two jobs behind the stages, as each may be repeated: an iteration is reported once.
    """
    root, run = context.root, context.run
    context.outbox.add(lambda: progress.finished(read_record(root, run, iteration, context.revisions)))
    concluded = context.outbox.add(partial(_give_up, context, shared, iteration))
    context.page.storing(iteration, "retention", concluded)


def _give_up(context: RunContext, shared: SharedParts, iteration: int) -> None:
    for retention in _retention(context):
        fence, seen, workflow = context.fence, context.revisions, workflow_of(context.config)
        give_up(context.root, workflow, context.run, retention, iteration, fence=fence, shared=shared, revisions=seen)


def tidy(context: RunContext, shared: SharedParts) -> None:
    """Delete train states that an earlier process did not delete, or that an earlier configuration kept."""
    for retention in _retention(context):
        fence, seen, workflow = context.fence, context.revisions, workflow_of(context.config)
        catch_up(context.root, workflow, context.run, retention, fence=fence, shared=shared, revisions=seen)


def _retention(context: RunContext) -> Iterator[Retention]:
    section = context.config.storage
    if section.keep_newest is not None:
        yield Retention(newest=section.keep_newest, every=section.keep_every)
