"""Work beside a run on its stored weights: evaluating them, and comparing engines with them.

The run's chain, its lease and its processes are left alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from flows.run import process_cluster
from flows.views.evaluations import EvaluationRecord, evaluations
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.manifest import need
from storage.ownership.scratch import sweep
from storage.revisions import Revisions, read_revisions
from storage.write_behind import WriteBehind
from tasks.checks import check_config, prepared_stage
from tasks.config.environment import prepare_process
from tasks.config.evaluation import EvaluationSettings
from tasks.config.stored import StoredConfig, read_config
from tasks.export.order import Chosen, choose
from tasks.rewards.judge import Judges
from tasks.stages.context import Performer, RunContext, directly, persistent
from tasks.stages.evaluation import evaluation
from tasks.stages.names import Stage
from tasks.stages.scored import judges_of
from tasks.stages.views import Prepared
from tasks.sync_check import CheckedSync, check_sync
from tasks.workers.fleet import Fleet, engines_on
from tasks.workers.folders import claim
from tasks.workers.hosts import transit


def evaluate_weights(
    root: str, which: str, settings: EvaluationSettings, say: Callable[[str], object], performer: Performer = directly
) -> EvaluationRecord:
    """Evaluate the weights of one iteration, or find that evaluation in storage; `which` is as
    `tasks.export.order.choose` takes it. Raises InputError if there are no such weights, or they cannot be served
    here."""
    instead = "export them, and start a run that begins with that model"
    store, chosen, revisions, stored = choose_served(root, which, instead)
    if chosen.why:
        say(f"iteration {chosen.iteration} is {chosen.why}")
    check_config(stored.config, store, prepared_stage(store, chosen.run))
    with open_evaluation(chosen.run, store, stored) as context:
        shown = replace(context, performer=performer, say=say, revisions=revisions)
        manifest = evaluation(persistent(shown, say), chosen.iteration, settings).manifest
    return recorded(store, chosen.run, manifest.digest)


def choose_served(root: str, which: str, instead: str) -> tuple[Root, Chosen, Revisions, StoredConfig]:
    """The weights of one iteration (`which` as for `evaluate_weights`), with what the run's engines served them by.
    Prepares this process too. Raises InputError if there are none; `instead` says what to do if the run has no
    engines."""
    prepare_process()
    store = open_root(root)
    chosen = choose(store, which)
    revisions = read_revisions(store, chosen.run)
    stored = read_config(store, chosen.run, revisions)
    if stored.config.retrain is not None:
        raise InputError(f"run {chosen.run!r} trains on stored samples and serves no weights: {instead}")
    return store, chosen, revisions, stored


@contextmanager
def open_evaluation(run: str, root: Root, stored: StoredConfig, purpose: str = "evaluation") -> Iterator[RunContext]:
    """Open the context of an evaluation, or of a check beside the run; its processes and files go at the end."""
    sweep()
    name = f"{claim(root.url, run)}:{purpose}"  # without a purpose it is that of the run's own processes
    with (
        process_cluster() as cluster,
        transit(name, cluster.local) as folder,
        Fleet(name, stored.config, cluster) as fleet,
        WriteBehind() as outbox,
    ):
        yield RunContext(run, root, stored.config, stored.digest, fleet, folder, outbox=outbox, folders=fleet.folders)


@contextmanager
def open_judges(root: Root, run: str) -> Iterator[Judges]:
    """Open exchanges and engine of the judges of a run; the engine starts when it is first asked, and ends with the
    block. Raises InputError: the run has stored no judge."""
    prepare_process()
    revisions = read_revisions(root, run)
    with open_evaluation(run, root, read_config(root, run, revisions), "reward") as context:
        yield judges_of(context, Prepared(need(root, run, 0, Stage.PREPARE, revisions)))


def recorded(root: Root, run: str, digest: str) -> EvaluationRecord:
    """A stored evaluation with its change. Raises InputError if it is not there any more."""
    found = next((one for one in evaluations(root, run) if one.manifest == digest), None)
    if found is None:
        raise InputError(f"evaluation {digest} of run {run!r} is not in {root.url}: the run was removed meanwhile")
    return found


def check_engines(root: str, which: str, say: Callable[[str], object]) -> CheckedSync:
    """Compare the engines of a run with the weights of one iteration (`which` as for `evaluate_weights`). The run's
    engines are only asked. Raises InputError if there are no such weights, or they cannot be served here."""
    store, chosen, _, stored = choose_served(root, which, "nothing can be compared")
    digests = _digests(store, chosen, say)
    cluster = process_cluster()
    running = {} if cluster.local else engines_on(claim(store.url, chosen.run), stored.config, cluster)
    if not running:
        check_config(stored.config, store, prepared_stage(store, chosen.run))
    with open_evaluation(chosen.run, store, stored, "sync-check") as context:
        return check_sync(context, chosen.iteration, digests, running, say)


def _digests(store: Root, chosen: Chosen, say: Callable[[str], object]) -> dict[str, str] | None:
    """Digests of the stored weights by name; None if this version cannot convert them without a trainer."""
    from tasks.export.export import stored_digests  # imports torch, and Megatron later

    try:
        return stored_digests(store, chosen)
    except InputError as error:
        say(f"the differing tensors cannot be named, because only digests were compared: {error}")
        return None
