"""The loop of a run on stored samples: its iteration 0 holds the state that it begins with and what it trains on."""

from dataclasses import dataclass

from storage.manifest import find, need
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.rescore import rescore
from tasks.stages.retrain import retrain, retrain_rescored
from tasks.stages.select import select
from tasks.stages.views import Prepared, Rescored, Selected, Trained


@dataclass(frozen=True)
class Position:
    """What one iteration hands to the next."""

    prepared: Prepared
    selected: Selected
    rescored: Rescored | None
    trained: Trained


def begin(run: RunContext) -> Position:
    """Iteration 0: the samples are selected and, if asked for, scored again. The state is there since the run is."""
    prepared = Prepared(need(run.root, run.run, 0, Stage.PREPARE))
    selected = select(run, 0, prepared)
    again = run.config.retrain is not None and run.config.retrain.rescore
    rescored = rescore(run, 0, prepared, selected) if again else None
    return Position(prepared, selected, rescored, Trained(need(run.root, run.run, 0, Stage.TRAIN)))


def iterate(run: RunContext, iteration: int, before: Position) -> Position:
    """Train on one share of the selection."""
    prepared, selected, rescored = before.prepared, before.selected, before.rescored
    if rescored is None:
        trained = retrain(run, iteration, prepared, selected, before.trained)
    else:
        trained = retrain_rescored(run, iteration, prepared, selected, rescored, before.trained)
    return Position(prepared, selected, rescored, trained)


def position_after(run: RunContext, iteration: int) -> Position:
    """The position of a run after `iteration`, from its manifests.

    Raises:
        NotCommitted: the iteration is not complete.
    """
    root, name = run.root, run.run
    rescored = find(root, name, 0, Stage.RESCORE)
    return Position(
        prepared=Prepared(need(root, name, 0, Stage.PREPARE)),
        selected=Selected(need(root, name, 0, Stage.SELECT)),
        rescored=None if rescored is None else Rescored(rescored),
        trained=Trained(need(root, name, iteration, Stage.TRAIN)),
    )
