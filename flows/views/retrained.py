"""How far a run on stored samples is, from its manifests alone; a run that samples for itself is answered too."""

import bisect
from collections.abc import Sequence

from flows.views.history import IterationRecord, first_incomplete, first_incomplete_of, stages_of
from storage.backends.root import Root
from storage.ids import Workflow
from storage.manifest import find
from tasks.config.run import RunConfig
from tasks.stages.names import RETRAINING, WORKFLOW, Stage
from tasks.stages.views import Selected


def workflow_of(config: RunConfig) -> Workflow:
    """Which stage of a run has which role in storage."""
    return WORKFLOW if config.retrain is None else RETRAINING


def last_iteration(root: Root, run: str, config: RunConfig) -> int:
    """The last iteration that a run is to have; 0 for one whose samples are not selected yet."""
    if config.retrain is None:
        return config.run.iterations
    selection = find(root, run, 0, Stage.SELECT)
    return 0 if selection is None else config.retrain.iterations(len(Selected(selection).shares))


def next_iteration(root: Root, run: str, config: RunConfig) -> int:
    """The iteration that a run continues with; one past the last if it is complete. Takes a few look-ups."""
    if config.retrain is None:
        return first_incomplete(root, run, config.run.iterations, config.evaluate.every)
    if any(find(root, run, 0, stage) is None for stage in wanted_stages(config, 0)):
        return 0
    later = range(1, last_iteration(root, run, config) + 1)
    return 1 + bisect.bisect_left(later, True, key=lambda iteration: find(root, run, iteration, Stage.TRAIN) is None)


def next_iteration_of(history: Sequence[IterationRecord], last: int, config: RunConfig) -> int:
    """The same from a history, for a run that is to have the iterations up to `last`."""
    if config.retrain is None:
        return first_incomplete_of(history, last, config.evaluate.every)
    whole = (set(wanted_stages(config, one.iteration)) <= set(one.done) for one in history)
    return next((number for number, done in enumerate(whole) if not done), len(history))


def wanted_stages(config: RunConfig, iteration: int) -> tuple[Stage, ...]:
    """The stages of an iteration of a run, in their order."""
    if config.retrain is None:
        return stages_of(iteration)
    if iteration:
        return (Stage.TRAIN,)
    return (Stage.PREPARE, Stage.TRAIN, Stage.SELECT, *([Stage.RESCORE] if config.retrain.rescore else []))
