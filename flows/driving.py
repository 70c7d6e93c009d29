"""Driving a run under its lease, from where its manifests end to the last iteration; without Prefect and Ray."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

from flows.iteration import begin, iterate, position_after
from flows.views.history import first_incomplete, read_record
from flows.views.progress import Progress
from storage.backends.root import Root
from storage.errors import Overtaken
from storage.ownership.lease import Lease, hold
from storage.upkeep.retention import Retention, catch_up, give_up
from storage.upkeep.shared import SharedParts
from tasks.config.run import RunConfig
from tasks.config.stored import record_config
from tasks.stages.context import RunContext
from tasks.stages.names import WORKFLOW
from tasks.stages.retrying import persistent

Opener = Callable[[Lease, str], AbstractContextManager[RunContext]]
"""Makes the context that stages work in from the lease and the identity of the recorded configuration; what it starts
ends with the block."""


def complete(
    name: str, root: Root, config: RunConfig, progress: Progress, opener: Opener, owner: str = "ratchet run"
) -> None:
    """Record the configuration and do the missing part of a run, both under its lease.

    If the process that drove the run before still publishes a stage, with another result, that result counts, and the
    run continues from it.
    """
    while next_iteration(root, name, config) <= config.run.iterations:
        try:
            with hold(root, name, owner) as lease:
                digest = record_config(root, name, config, lease)
                with opener(lease, digest) as context:
                    advance(persistent(context, progress.say), progress, next_iteration(root, name, config))
        except Overtaken as fact:
            progress.say(f"{fact}")


def next_iteration(root: Root, name: str, config: RunConfig) -> int:
    """The iteration to continue with; one past the last if the run is complete."""
    return first_incomplete(root, name, config.run.iterations, config.evaluate.every)


def advance(context: RunContext, progress: Progress, first: int) -> None:
    """Do the iterations from `first` to the last; their results are durable on return."""
    shared = SharedParts(context.root, context.run)
    tidy(context, shared)  # before a stage can find an old part and use it
    position = begin(context) if first == 0 else position_after(context, first - 1)
    if first == 0:
        conclude(context, progress, shared, 0)
    for iteration in range(max(first, 1), context.config.run.iterations + 1):
        position = iterate(context, iteration, position)
        conclude(context, progress, shared, iteration)
    context.outbox.settle()


def conclude(context: RunContext, progress: Progress, shared: SharedParts, iteration: int) -> None:
    """Report an iteration once it is published completely, and delete the train state that is no longer kept.

    These are two jobs behind the stages, as each may be repeated: an iteration is reported once.
    """
    context.outbox.add(lambda: progress.finished(read_record(context.root, context.run, iteration)))
    context.outbox.add(partial(_give_up, context, shared, iteration))


def _give_up(context: RunContext, shared: SharedParts, iteration: int) -> None:
    for retention in _retention(context):
        give_up(context.root, WORKFLOW, context.run, retention, iteration, fence=context.fence, shared=shared)


def tidy(context: RunContext, shared: SharedParts) -> None:
    """Delete train states that an earlier process did not delete, or that an earlier configuration kept."""
    for retention in _retention(context):
        catch_up(context.root, WORKFLOW, context.run, retention, fence=context.fence, shared=shared)


def _retention(context: RunContext) -> Iterator[Retention]:
    section = context.config.storage
    if section.keep_newest is not None:
        yield Retention(newest=section.keep_newest, every=section.keep_every)
