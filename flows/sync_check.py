"""Comparing the engines of a run with what it has stored: those that it has on a cluster, or new ones."""

from collections.abc import Callable, Mapping

from flows.evaluating import choose_served, open_evaluation
from flows.run import process_cluster
from storage.backends.root import Root
from storage.errors import InputError
from tasks.checks import check_config, prepared_stage
from tasks.config.stored import StoredConfig
from tasks.export.choice import Chosen
from tasks.sync_check import CheckedSync, check_sync
from tasks.workers.engines import EngineHandle
from tasks.workers.fleet import engines_on


def check_engines(root: str, which: str, say: Callable[[str], object]) -> CheckedSync:
    """Compare the engines of a run with the weights of one iteration. The run's engines are only asked.

    Args:
        which: RUN for its last iteration, RUN@ITERATION, or RUN@best.

    Raises:
        InputError: there are no such weights, or they cannot be served here.
    """
    weights = choose_served(root, which, "nothing can be compared")
    store, chosen, stored = weights.store, weights.chosen, weights.stored
    digests = _digests(store, chosen, say)
    running = _running(chosen.run, stored)
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
        say(f"tensors are not named, only digests compared: {error}")
        return None


def _running(run: str, stored: StoredConfig) -> Mapping[str, EngineHandle]:
    cluster = process_cluster()
    return {} if cluster.local else engines_on(run, stored.config, cluster)
