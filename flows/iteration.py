"""The loop: the stages of a run, over two sources of samples. Only manifests pass between stages, as typed views."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from flows.views.history import evaluation_due
from storage.errors import InputError
from tasks.config.run import RunConfig
from tasks.stages.beside import Beside
from tasks.stages.context import RunContext
from tasks.stages.evaluate import evaluate
from tasks.stages.names import Stage
from tasks.stages.prepare import prepare
from tasks.stages.reward import rescore, reward
from tasks.stages.rollout import rollout
from tasks.stages.select import select
from tasks.stages.train import retrain, train, warm_up
from tasks.stages.views import Prepared, Rescored, Rewards, Rollouts, Selected, Served, Trained, View
from tasks.stages.weight_sync import weight_sync


@dataclass(frozen=True)
class Position:
    """The results that one iteration hands to the next; all are committed, or wait in the outbox."""

    prepared: Prepared
    trained: Trained
    served: Served
    rollouts: tuple[Rollouts, ...] = ()
    """That of the iteration, if it is not 0, and those of the next ones that were sampled ahead."""
    rewards: tuple[Rewards, ...] = ()  # of those that were sampled ahead


def begin(run: RunContext) -> Position:
    """Iteration 0: model and data become part of the run, the warm-up makes the first state, the engines serve it."""
    prepared = prepare(run, 0)
    trained = warm_up(run, 0, prepared)
    served = weight_sync(run, 0, prepared, trained)
    if _evaluation_due(run, 0):
        evaluate(run, 0, prepared, served)
    return Position(prepared, trained, served)


def iterate(run: RunContext, iteration: int, before: Position) -> Position:
    """One RL iteration, from served weights to the next served weights. Rollouts of the next `rollout.ahead` iterations
    are sampled and scored beside its training: the engines get its weights once both are done."""
    prepared, ahead, last = before.prepared, run.config.rollout.ahead, run.config.run.iterations
    # rollouts that need older weights than those served last come first; only a start finds that they are missing
    due = _sampled(run, before, min(last, iteration + max(ahead - 1, 0)) if iteration > 1 else 1)
    rollouts = next(one for one in due.rollouts if one.manifest.iteration == iteration)
    rewards = next((one for one in due.rewards if one.manifest.iteration == iteration), None)
    if rewards is None and run.config.train.policy.needs_rewards:
        rewards = reward(run, iteration, prepared, rollouts)
    with _sampling(run, due, min(last, iteration + ahead)) as beside:
        trained = train(run, iteration, prepared, rollouts, rewards, before.trained)
    served = weight_sync(run, iteration, prepared, trained)
    if _evaluation_due(run, iteration):
        evaluate(run, iteration, prepared, served)
    later = beside()
    return Position(prepared, trained, served, _since(iteration, later.rollouts), _since(iteration, later.rewards))


def _since[V: View](iteration: int, views: tuple[V, ...]) -> tuple[V, ...]:
    return tuple(one for one in views if one.manifest.iteration >= iteration)


def _sampled(run: RunContext, before: Position, last: int) -> Position:
    """The position with the rollouts up to that of iteration `last`, which are scored too beside a training."""
    rollouts, rewards = before.rollouts, before.rewards
    for iteration in range(rollouts[-1].manifest.iteration + 1 if rollouts else 1, last + 1):
        version, drawn = sampled_by(run, iteration), rollouts[-1] if rollouts else before.prepared
        now = before.served.weight_version == version
        served = before.served if now else Served(run.need(version, Stage.WEIGHT_SYNC))
        rollouts = (*rollouts, rollout(run, iteration, before.prepared, served, drawn))
        if run.beside and run.config.train.policy.needs_rewards:
            rewards = (*rewards, reward(run, iteration, before.prepared, rollouts[-1]))
    return replace(before, rollouts=rollouts, rewards=rewards)


@contextmanager
def _sampling(run: RunContext, due: Position, last: int) -> Iterator[Callable[[], Position]]:
    """Sample the rollouts up to that of iteration `last` beside the block; afterwards the call returns the position."""
    if due.rollouts[-1].manifest.iteration >= last:
        yield lambda: due
        return
    with Beside(run, lambda own: _sampled(own, due, last)) as beside:
        yield beside.result


def sampled_by(run: RunContext, iteration: int) -> int:
    """The iteration whose weight-sync stage serves the weights that sample the rollout of `iteration`."""
    return max(0, iteration - 1 - run.config.rollout.ahead)


def position_after(run: RunContext, iteration: int) -> Position:
    """The position of a run after `iteration`, from its manifests. Raises NotCommitted if that is not complete."""
    prepared, trained = Prepared(run.need(0, Stage.PREPARE)), Trained(run.need(iteration, Stage.TRAIN))
    served = Served(run.need(iteration, Stage.WEIGHT_SYNC))
    return Position(prepared, trained, served, (Rollouts(run.need(iteration, Stage.ROLLOUT)),) if iteration else ())


@dataclass(frozen=True)
class StoredPosition:
    """The position of a run on stored samples, whose iteration 0 holds the first state and the samples."""

    prepared: Prepared
    selected: Selected
    rescored: Rescored | None
    trained: Trained


def begin_stored(run: RunContext) -> StoredPosition:
    """Iteration 0: samples are selected and, if requested, scored again. The state is part of the run already."""
    prepared = Prepared(run.need(0, Stage.PREPARE))
    selected = select(run, 0, prepared)
    again = run.config.retrain is not None and run.config.retrain.rescore
    rescored = rescore(run, 0, prepared, selected) if again else None
    return StoredPosition(prepared, selected, rescored, Trained(run.need(0, Stage.TRAIN)))


def iterate_stored(run: RunContext, iteration: int, before: StoredPosition) -> StoredPosition:
    trained = retrain(run, iteration, before.prepared, before.selected, before.rescored, before.trained)
    return replace(before, trained=trained)


def stored_position_after(run: RunContext, iteration: int) -> StoredPosition:
    prepared, selected = Prepared(run.need(0, Stage.PREPARE)), Selected(run.need(0, Stage.SELECT))
    rescored = None if (found := run.find(0, Stage.RESCORE)) is None else Rescored(found)
    return StoredPosition(prepared, selected, rescored, Trained(run.need(iteration, Stage.TRAIN)))


@dataclass(frozen=True)
class Source[P]:
    """A source of samples: the beginning of a run, its next iteration, and its position from what is stored."""

    begin: Callable[[RunContext], P]
    iterate: Callable[[RunContext, int, P], P]
    position_after: Callable[[RunContext, int], P]


SAMPLED = Source(begin, iterate, position_after)
STORED = Source(begin_stored, iterate_stored, stored_position_after)


def source_of(config: RunConfig) -> Source[Any]:
    """The source of a run's samples: its engines, or what other runs have stored."""
    return SAMPLED if config.retrain is None else STORED


def redo(run: RunContext, iteration: int, stage: Stage) -> View:
    """Repeat one stage alone, in the current revision, from the committed stages before it. Raises NotCommitted if an
    input is not there, InputError if the stage is the start of the run."""
    prepared = Prepared(run.need(0, Stage.PREPARE))
    match stage:
        case Stage.ROLLOUT:
            served = Served(run.need(sampled_by(run, iteration), Stage.WEIGHT_SYNC))
            drawn = Rollouts(run.need(iteration - 1, Stage.ROLLOUT)) if iteration > 1 else prepared
            return rollout(run, iteration, prepared, served, drawn)
        case Stage.REWARD if run.config.train.policy.needs_rewards:
            return reward(run, iteration, prepared, Rollouts(run.need(iteration, Stage.ROLLOUT)))
        case Stage.TRAIN if iteration:
            rollouts = Rollouts(run.need(iteration, Stage.ROLLOUT))
            rewarded = run.config.train.policy.needs_rewards
            rewards = Rewards(run.need(iteration, Stage.REWARD)) if rewarded else None
            before = Trained(run.need(iteration - 1, Stage.TRAIN))
            return train(run, iteration, prepared, rollouts, rewards, before)
        case Stage.WEIGHT_SYNC:
            return weight_sync(run, iteration, prepared, Trained(run.need(iteration, Stage.TRAIN)))
        case Stage.EVALUATE:
            return evaluate(run, iteration, prepared, Served(run.need(iteration, Stage.WEIGHT_SYNC)))
    raise InputError(f"{stage} of iteration {iteration} is what the run is made from: start a new run instead")


def _evaluation_due(run: RunContext, iteration: int) -> bool:
    return evaluation_due(iteration, run.config.run.iterations, run.config.evaluate.every)
