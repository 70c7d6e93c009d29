"""A run as a complete Prefect flow: it sets up its process, checks, continues where the manifests end, and reports.

Command line, deployment and test call it alike; it needs nothing before or after."""

import contextvars
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect import flow, get_run_logger
from prefect.exceptions import PrefectException

from flows.driving import Drive, is_complete
from flows.preflight import check_start
from flows.proof.faults import injected
from flows.subflows import Subflows
from flows.views.artifacts import LivePage, examples_publisher, publish
from flows.views.history import last_iteration
from flows.views.progress import Progress
from flows.views.reports import Reports, write_report
from flows.views.status import read_status
from storage.backends.root import Root, open_root
from storage.digest import value_digest
from storage.ids import check_run_name
from storage.ownership.lease import Lease, check_free
from storage.ownership.scratch import sweep
from storage.write_behind import WriteBehind
from tasks.checks import advice, prepared_stage, prompt_notes
from tasks.config.credentials import check_root_url
from tasks.config.environment import Settings, prepare_process
from tasks.config.run import RunConfig
from tasks.environments.hosting import host_processes
from tasks.rewards.scoring import notices
from tasks.stages.context import RunContext
from tasks.workers.cluster import Cluster
from tasks.workers.fleet import Fleet, release
from tasks.workers.folders import check_folders, claim, kept_in_memory
from tasks.workers.hosts import transit
from tasks.workers.logs import heard


@functools.cache
def process_cluster() -> Cluster:
    """The Ray of this process: Ray supports only one."""
    return Cluster(Settings.from_environment())


@flow(name="ratchet", flow_run_name="{name}", persist_result=False)
def run(name: str, root: str, config: RunConfig, one_stage: bool = False) -> None:
    """Do the iterations of a run that are not complete yet, up to `config.run.iterations`, then publish the result.
    With `one_stage` do only the stage that was asked to be done again."""
    with Progress(name, config.run.iterations) as progress:
        perform(name, root, config, progress, one_stage=one_stage)


def perform(
    name: str,
    root: str,
    config: RunConfig,
    progress: Progress,
    owner: str = "ratchet run",
    *,
    one_stage: bool = False,
    held: Lease | None = None,
) -> None:
    """Do the work of the flow `run` within any flow; `owner` and `held` are those of `Drive`."""
    store = ready(name, root, config, held)
    for sentence in advice(config):
        progress.say(sentence)
    for notice in (*notices(config.reward), *prompt_notes(config, prepared_stage(store, name))):
        progress.note(notice)
    with (
        heard(functools.partial(contextvars.copy_context().run, get_run_logger().info), progress.counted),
        LivePage(
            name, store.url, last_iteration(store, name, config), progress.note, viewer=config.report.viewer
        ) as page,
        Reports(store, name, config, progress.warn, (progress.sampled, examples_publisher(name))) as reports,
    ):
        progress.follow(page)
        progress.on_finished(page.finished)
        progress.on_finished(reports.add)
        opener = functools.partial(open_context, name, store, config, progress)
        Drive(name, store, config, progress, opener, owner, held).complete(one_stage)
    progress.say("drawing the curves")
    png = write_report(store, name)
    try:
        publish(read_status(store, name), png)
    except (httpx.TransportError, PrefectException) as error:
        progress.say(f"the Prefect server does not answer ({error}): the page of this flow run lacks its artifacts")


def release_workers(name: str, root: str) -> int:
    """End what a run of a root has left on the cluster, and return how many processes that were; our own Ray leaves
    none. Raises InputError or WorkerLost if the cluster does not answer."""
    with process_cluster() as cluster:
        return 0 if cluster.local else release(claim(root, name), cluster)


def ready(name: str, root: str, config: RunConfig, held: Lease | None = None) -> Root:
    """Set up this process, refuse what cannot work, or would continue a run with another meaning, and return the root.
    Stores nothing. `held` is the run's lease, if this process holds it already. Raises InputError, LeaseHeld if a
    process of this machine drives the run, StorageUnavailable if the root cannot be written."""
    prepare_process()
    check_run_name(name)
    check_folders()
    check_root_url(root)
    store = open_root(root).with_patience(config.run.outage_s)
    check_start(name, store, config)
    if held is None and not is_complete(store, name, config):
        check_free(store, name)
    return store


@contextmanager
def open_context(
    name: str, root: Root, config: RunConfig, progress: Progress, lease: Lease, config_digest: str
) -> Iterator[RunContext]:
    """Open the context of the stages. Its processes and files end with the block; those of a killed process go first.

    What a killed process of this run has left in shared memory, its last state, is taken over."""
    held = claim(root.url, name)
    with kept_in_memory(value_digest([root.url, name])) as memory:
        sweep()
        with (
            process_cluster() as cluster,
            transit(held, cluster.local) as folder,
            Fleet(held, config, cluster) as fleet,
            injected(cluster.settings.faults, lambda: {**fleet.processes(), **host_processes()}),
            Subflows(name, config.run.iterations, progress.advanced) as page,
            WriteBehind() as outbox,
        ):
            memory = memory if cluster.local else None
            shown = {"performer": page.performer, "announce": progress.begins, "say": progress.note, "page": page}
            place = {"memory": memory, "folders": fleet.folders}
            yield RunContext(name, root, config, config_digest, fleet, folder, lease, outbox, **place, **shown)
