"""Which iteration of which run is exported: the last, a given one, or the best evaluated whose state is kept."""

import math
from dataclasses import dataclass

from storage.backends.root import Root
from storage.errors import InputError
from storage.manifest import Manifest
from storage.upkeep.catalog import Contents, contents, require_run
from tasks.stages.names import Stage

BEST = "best"


@dataclass(frozen=True)
class Chosen:
    """One iteration of a run, and what the run has recorded."""

    run: str
    iteration: int
    recorded: Contents

    def manifest(self, stage: Stage, iteration: int | None = None) -> Manifest:
        """The manifest of a stage, by default of the chosen iteration.

        Raises:
            InputError: there is none.
        """
        at = self.iteration if iteration is None else iteration
        found = self.find(stage, at)
        if found is None:
            raise InputError(f"run {self.run!r} has no {stage} of iteration {at}: let it get that far first")
        return found

    def find(self, stage: Stage, iteration: int) -> Manifest | None:
        """The manifest of a stage in the run's head, if there is one."""
        return _by_iteration(self.recorded, stage).get(iteration)


def choose(root: Root, which: str) -> Chosen:
    """Resolve `RUN`, `RUN@ITERATION` or `RUN@best`.

    The best iteration has the highest held-out accuracy of those whose states are kept; of equal ones the first.

    Raises:
        InputError: there is no such run or iteration, its state is not kept, or nothing was evaluated.
    """
    run, at, wanted = which.partition("@")
    require_run(root, run)
    recorded = contents(root, run)
    kept = _kept(recorded)
    if not kept:
        raise InputError(f"run {run!r} has no complete iteration yet: let it finish iteration 0 first")
    if not at:
        return Chosen(run, kept[-1], recorded)
    if wanted == BEST:
        return Chosen(run, _best(recorded, run, kept), recorded)
    if not (wanted.isascii() and wanted.isdigit()):
        raise InputError(f"{which!r} is not of the form RUN, RUN@ITERATION or RUN@{BEST}")
    iteration = int(wanted)
    if iteration not in kept:
        complete = iteration in _by_iteration(recorded, _last_stage(recorded))
        fact = "is not kept: retention has deleted it" if complete else "is not there"
        raise InputError(
            f"the state of iteration {iteration} of run {run!r} {fact}; those of {kept} are. Choose one of them as "
            f"{run}@ITERATION"
        )
    return Chosen(run, iteration, recorded)


def _kept(recorded: Contents) -> list[int]:
    """Iterations that are complete and whose states are there, ascending."""
    synced = _by_iteration(recorded, _last_stage(recorded))
    states = _by_iteration(recorded, Stage.TRAIN)
    return sorted(
        iteration for iteration, state in states.items() if state.key in recorded.kept and iteration in synced
    )


def _last_stage(recorded: Contents) -> Stage:
    """The stage that completes an iteration: a run on stored samples serves no weights."""
    return Stage.TRAIN if _by_iteration(recorded, Stage.SELECT) else Stage.WEIGHT_SYNC


def _best(recorded: Contents, run: str, kept: list[int]) -> int:
    evaluated = _by_iteration(recorded, Stage.EVALUATE)
    scores = {at: evaluated[at].metrics.get("accuracy") for at in kept if at in evaluated}
    usable = {at: score for at, score in scores.items() if score is not None and math.isfinite(score)}
    if not usable:
        raise InputError(
            f"run {run!r} has no evaluation of an iteration whose state is kept ({kept}): choose one as {run}@ITERATION"
        )
    return max(sorted(usable), key=lambda at: usable[at])


def _by_iteration(recorded: Contents, stage: Stage) -> dict[int, Manifest]:
    return {manifest.iteration: manifest for manifest in recorded.newest if manifest.stage == stage}
