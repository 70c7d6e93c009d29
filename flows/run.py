"""A run as a Prefect flow. It goes on where the manifests end, so running it again continues it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from prefect import flow

from flows.iteration import begin, iterate, position_after
from flows.proof.faults import injected
from flows.views.artifacts import publish
from flows.views.curves import store_plot
from flows.views.history import first_incomplete, read_iteration, record_of
from flows.views.progress import Progress
from flows.views.status import read_status
from storage.backends.root import Root
from storage.errors import Overtaken
from storage.ownership.lease import Lease, hold
from storage.upkeep.retention import Retention, collect, give_up
from storage.write_behind import Outbox
from tasks.config.environment import Settings
from tasks.config.run import RunConfig
from tasks.stages.context import RunContext, open_run
from tasks.stages.names import WORKFLOW
from tasks.workers.cluster import Cluster
from tasks.workers.fleet import Fleet
from tasks.workers.scratch import scratch, sweep


@functools.cache
def process_cluster() -> Cluster:
    """The Ray of this process: Ray itself knows only one."""
    return Cluster(Settings.from_environment())


@contextmanager
def open_context(name: str, root: Root, config: RunConfig, lease: Lease) -> Iterator[RunContext]:
    """The room a run works in; its processes and scratch files are gone at the end, those of a killed one now."""
    sweep()
    with (
        scratch() as folder,
        process_cluster() as cluster,
        Fleet(name, config, cluster) as fleet,
        injected(cluster.settings.faults, fleet.processes),
        Outbox() as outbox,
    ):
        yield RunContext(name, root, config, fleet, folder, lease, outbox)


Room = Callable[[str, Root, RunConfig, Lease], AbstractContextManager[RunContext]]
"""From run, root, configuration and lease to the room that stages work in."""


@flow(name="ratchet", flow_run_name="{name}", persist_result=False)
def run(name: str, root: str, config: RunConfig) -> None:
    """Do the iterations of a run that are not complete yet, then publish what came of it.

    Args:
        name: id of the run.
        root: URL of the storage root.
        config: the resolved configuration; `config.run.iterations` says how far to go.
    """
    store, _ = open_run(config, root, name)
    with Progress(name, config.run.iterations) as progress:
        complete(name, store, config, progress)
        progress.say("drawing the curves")
        png = store_plot(store, name, read_status(store, name).history)
        publish(read_status(store, name), png)


def complete(name: str, root: Root, config: RunConfig, progress: Progress, room: Room = open_context) -> None:
    """Do what is missing of a run, under its lease.

    A stage that its former driver published after all, with another result, is taken as it is, and the run goes on from
    there.
    """
    while next_iteration(root, name, config) <= config.run.iterations:
        try:
            with hold(root, name, "ratchet run") as lease, room(name, root, config, lease) as context:
                advance(context, progress, next_iteration(root, name, config))
        except Overtaken as fact:
            progress.say(f"{fact}")


def next_iteration(root: Root, name: str, config: RunConfig) -> int:
    """The iteration to go on with; beyond the last if the run is complete."""
    return first_incomplete(root, name, config.run.iterations, config.evaluate.every)


def advance(context: RunContext, progress: Progress, first: int) -> None:
    """Do the iterations from `first` to the last; what they leave is durable when it returns."""
    context.outbox.add(partial(tidy, context))
    position = begin(context, progress) if first == 0 else position_after(context, first - 1)
    if first == 0:
        context.outbox.add(partial(conclude, context, progress, 0))
    for iteration in range(max(first, 1), context.config.run.iterations + 1):
        position = iterate(context, progress, iteration, position)
        context.outbox.add(partial(conclude, context, progress, iteration))
    context.outbox.settle()


def conclude(context: RunContext, progress: Progress, iteration: int) -> None:
    """Report an iteration, all of which is published, and give up the train state that need not be kept any longer."""
    root, run = context.root, context.run
    before = read_iteration(root, run, iteration - 1)[-1] if iteration else None
    progress.finished(record_of(read_iteration(root, run, iteration), before))
    retention = _retention(context)
    if retention is not None:
        give_up(root, WORKFLOW, run, retention, iteration)


def tidy(context: RunContext) -> None:
    """Give up what an earlier process did not come to, or an earlier configuration kept."""
    retention = _retention(context)
    if retention is not None:
        collect(context.root, WORKFLOW, context.run, retention, apply=True)


def _retention(context: RunContext) -> Retention | None:
    section = context.config.storage
    return None if section.keep_newest is None else Retention(newest=section.keep_newest, every=section.keep_every)
