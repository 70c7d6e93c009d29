"""The loop: what a run consists of, stage by stage. Only manifests pass between stages, as typed views."""

from dataclasses import dataclass

from flows.views.history import evaluation_due
from storage.errors import InputError
from tasks.stages.context import RunContext
from tasks.stages.evaluate import evaluate
from tasks.stages.names import Stage
from tasks.stages.prepare import prepare
from tasks.stages.reward import reward
from tasks.stages.rollout import rollout
from tasks.stages.train import train
from tasks.stages.views import Prepared, Rewards, Rollouts, Served, Trained, View
from tasks.stages.warm_up import warm_up
from tasks.stages.weight_sync import weight_sync


@dataclass(frozen=True)
class Position:
    """What one iteration hands to the next; all of it is committed, or waits in the outbox."""

    prepared: Prepared
    trained: Trained
    served: Served


def begin(run: RunContext) -> Position:
    """Iteration 0: model and data become part of the run, the warm-up makes the first state, the engines serve it."""
    prepared = prepare(run, 0)
    trained = warm_up(run, 0, prepared)
    served = weight_sync(run, 0, prepared, trained)
    if _evaluation_due(run, 0):
        evaluate(run, 0, prepared, served)
    return Position(prepared, trained, served)


def iterate(run: RunContext, iteration: int, before: Position) -> Position:
    """One RL iteration, from served weights to the next served weights."""
    prepared = before.prepared
    rollouts = rollout(run, iteration, prepared, before.served)
    rewards = reward(run, iteration, prepared, rollouts)
    trained = train(run, iteration, prepared, rollouts, rewards, before.trained)
    served = weight_sync(run, iteration, prepared, trained)
    if _evaluation_due(run, iteration):
        evaluate(run, iteration, prepared, served)
    return Position(prepared, trained, served)


def position_after(run: RunContext, iteration: int) -> Position:
    """The position of a run after `iteration`, from its manifests.

    Raises:
        NotCommitted: the iteration is not complete.
    """
    return Position(
        prepared=Prepared(run.need(0, Stage.PREPARE)),
        trained=Trained(run.need(iteration, Stage.TRAIN)),
        served=Served(run.need(iteration, Stage.WEIGHT_SYNC)),
    )


def redo(run: RunContext, iteration: int, stage: Stage) -> View:
    """One stage alone, in the revision that is worked on, from what is committed before it.

    Raises:
        NotCommitted: an input is not there.
        InputError: the stage is the start of the run.
    """
    prepared = Prepared(run.need(0, Stage.PREPARE))
    match stage:
        case Stage.ROLLOUT:
            return rollout(run, iteration, prepared, Served(run.need(iteration - 1, Stage.WEIGHT_SYNC)))
        case Stage.REWARD:
            return reward(run, iteration, prepared, Rollouts(run.need(iteration, Stage.ROLLOUT)))
        case Stage.TRAIN if iteration:
            rollouts = Rollouts(run.need(iteration, Stage.ROLLOUT))
            rewards = Rewards(run.need(iteration, Stage.REWARD))
            before = Trained(run.need(iteration - 1, Stage.TRAIN))
            return train(run, iteration, prepared, rollouts, rewards, before)
        case Stage.WEIGHT_SYNC:
            return weight_sync(run, iteration, prepared, Trained(run.need(iteration, Stage.TRAIN)))
        case Stage.EVALUATE:
            return evaluate(run, iteration, prepared, Served(run.need(iteration, Stage.WEIGHT_SYNC)))
    raise InputError(f"{stage} of iteration {iteration} is what the run is made from: start a new run instead")


def _evaluation_due(run: RunContext, iteration: int) -> bool:
    return evaluation_due(iteration, run.config.run.iterations, run.config.evaluate.every)
