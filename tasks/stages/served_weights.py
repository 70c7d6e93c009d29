"""Engines that serve the weights of an iteration: found so, or brought to it, with the same proof as a weight sync."""

from collections.abc import Mapping

from tasks.engine.protocol import EngineIdentity
from tasks.stages.context import RunContext, await_start
from tasks.stages.held_state import ensure_state, local_copy, release, trainers
from tasks.stages.names import Stage
from tasks.stages.prepared import model_directory
from tasks.stages.samples import keep_left
from tasks.stages.transaction import deliver
from tasks.stages.views import Prepared, Served, Trained
from tasks.workers.interface import EngineHandle


def engines_of(context: RunContext, prepared: Prepared) -> list[EngineHandle]:
    """The run's engines, started if necessary. Nothing is in flight at any of them, and what an interrupted rollout had
    there is stored: with newer weights it would go on as another response."""
    engines = context.workers.engines(model_directory(context, prepared))
    for number, engine in enumerate(engines):
        await_start(context, engine, f"engine {number}", engine.identity)
    keep_left(context.root, engines)
    return engines


def rest(context: RunContext, prepared: Prepared) -> None:
    """Let the engines give their cards' memory to the trainer, with `engine.sleep`; the next request wakes them. A run
    that trains on stored samples has none."""
    if not context.config.engine.sleep or context.config.retrain is not None:
        return
    asleep = [engine.sleep() for engine in engines_of(context, prepared)]
    if not all(asleep):
        context.say("engine.sleep has no effect here: on CPU engines keep their memory")


def ensure_served(context: RunContext, prepared: Prepared, served: Served) -> list[EngineHandle]:
    """Engines that hold the weights that the weight-sync stage `served` recorded. An engine that is new, or holds
    something else, gets them from the trainer ranks, if they hold the train state of that iteration, else from its
    stored weights alone: the ranks still hold what they held before. The other engines are left alone. As in
    `engines_of` nothing is in flight at any of them. The trainer ranks release what `train.memory` names. Raises
    SyncMismatch: the stored state gives other weights than those recorded, or they did not arrive."""
    if not context.beside:
        release(context, trainers(context, prepared))
    engines = engines_of(context, prepared)
    wanted = EngineIdentity(weight_version=served.weight_version, weights_digest=served.weights_digest)
    lacking = {number: engine for number, engine in enumerate(engines) if engine.identity() != wanted}
    if lacking:
        with context.turn:
            _bring(context, prepared, served, lacking)
    return engines


def _bring(context: RunContext, prepared: Prepared, served: Served, lacking: Mapping[int, EngineHandle]) -> None:
    context.outbox.settle()  # the state to load may not be stored yet
    trained = Trained(context.need(served.weight_version, Stage.TRAIN))
    group, version, expected = trainers(context, prepared), served.weight_version, served.weights_digest
    if not trained.manifest.parts:  # there is nothing to send but what ranks hold
        group = ensure_state(context, prepared, trained)
    if group.identity() == trained.digest:
        deliver(context, lacking, group, version, expected)
    else:
        with local_copy(context, trained, weights_only=True) as folder:
            deliver(context, lacking, group, version, expected, folder)
    release(context, group)
