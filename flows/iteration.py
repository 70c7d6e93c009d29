"""The sentences: what a run is made of, stage by stage. Only manifests pass between them."""

from dataclasses import dataclass
from functools import partial

from flows.views.history import evaluation_due
from flows.views.progress import Progress
from storage.manifest import Manifest, need
from tasks.stages import prefect_tasks as stages
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.prefect_tasks import StageTask


@dataclass(frozen=True)
class Position:
    """What one iteration leaves for the next; all of it is committed."""

    prepared: Manifest
    trained: Manifest
    synced: Manifest


def begin(context: RunContext, progress: Progress) -> Position:
    """Iteration 0: model and data become part of the run, the warm-up makes the first state, the engines serve it."""
    do = partial(_announced, context, progress, 0)
    prepared = do(stages.prepare)
    trained = do(stages.warm_up, prepared)
    synced = do(stages.weight_sync, prepared, trained)
    if _evaluation_due(context, 0):
        do(stages.evaluate, prepared, synced)
    return Position(prepared, trained, synced)


def iterate(context: RunContext, progress: Progress, iteration: int, before: Position) -> Position:
    """One RL iteration, from the weights served to the next weights served."""
    do, prepared = partial(_announced, context, progress, iteration), before.prepared
    rollouts = do(stages.rollout, prepared, before.synced)
    rewards = do(stages.reward, prepared, rollouts)
    trained = do(stages.train, prepared, rollouts, rewards, before.trained)
    synced = do(stages.weight_sync, prepared, trained)
    if _evaluation_due(context, iteration):
        do(stages.evaluate, prepared, synced)
    return Position(prepared, trained, synced)


def position_after(context: RunContext, iteration: int) -> Position:
    """Where a run stands that has done `iteration`, from its manifests.

    Raises:
        NotCommitted: it has not.
    """
    root, run = context.root, context.run
    return Position(
        prepared=need(root, run, 0, Stage.PREPARE),
        trained=need(root, run, iteration, Stage.TRAIN),
        synced=need(root, run, iteration, Stage.WEIGHT_SYNC),
    )


def _announced(
    context: RunContext, progress: Progress, iteration: int, stage: StageTask, *inputs: Manifest
) -> Manifest:
    with progress.stage(iteration, stage.stage):
        return stage(context, iteration, *inputs)


def _evaluation_due(context: RunContext, iteration: int) -> bool:
    return evaluation_due(iteration, context.config.run.iterations, context.config.evaluate.every)
