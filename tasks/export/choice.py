"""Choice of the exported iteration: the last, a given one, or the best evaluated whose state is kept."""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import JsonValue

from storage.backends.root import Root
from storage.errors import InputError
from storage.manifest import Manifest
from storage.upkeep.catalog import Contents, contents, require_run
from tasks.config.evaluation import ASKED, EXACT, PASS, SCORED_BY
from tasks.stages.names import Stage

BEST, PASSES = "best", "pass"
_METRICS = {PASSES: "pass_rate", "reward": "reward_mean"}


@dataclass(frozen=True)
class Chosen:
    run: str
    iteration: int
    recorded: Contents
    why: str = ""  # measure and iterations by which it is the best; empty if it was not chosen as the best

    def manifest(self, stage: Stage, iteration: int | None = None) -> Manifest:
        """The manifest of a stage, by default of the chosen iteration. Raises InputError: there is none."""
        at = self.iteration if iteration is None else iteration
        if (found := self.find(stage, at)) is None:
            raise InputError(f"run {self.run!r} has no {stage} of iteration {at}: let it get that far first")
        return found

    def find(self, stage: Stage, iteration: int) -> Manifest | None:
        """The manifest of a stage in the run's head, if there is one."""
        return _by_iteration(self.recorded, stage).get(iteration)


def choose(root: Root, which: str) -> Chosen:
    """Resolve `RUN`, `RUN@ITERATION`, `RUN@best` or `RUN@best.MEASURE`. The best iteration has the highest value of
    those whose states are kept, and that the reward function of the newest evaluation has scored; of equal ones the
    first. MEASURE is `pass` (held-out pass rate, the default), `reward` (held-out mean reward) or the name of a
    component of the reward. Raises InputError: there is no such run or iteration, its state is not kept, or nothing was
    evaluated by the measure."""
    run, at, wanted = which.partition("@")
    require_run(root, run)
    recorded = contents(root, run)
    if not (kept := _kept(recorded)):
        fact = f"run {run!r} has no complete iteration yet"
        raise InputError(f"{fact}: let it finish iteration 0 first. Imported samples have no weights")
    if not at:
        return Chosen(run, kept[-1], recorded)
    best, _, measure = wanted.partition(".")
    if best == BEST:
        return _best(recorded, run, kept, measure or PASSES)
    if not (wanted.isascii() and wanted.isdigit()):
        raise InputError(f"{which!r} is not of the form RUN, RUN@ITERATION or RUN@{BEST}[.MEASURE]")
    if (iteration := int(wanted)) not in kept:
        complete = iteration in _by_iteration(recorded, _last_stage(recorded))
        fact = "is not kept (storage.save_every, storage.keep_newest)" if complete else "is not there"
        state = f"the state of iteration {iteration} of run {run!r}"
        raise InputError(f"{state} {fact}; those of {kept} are. Choose one of them as {run}@ITERATION")
    return Chosen(run, iteration, recorded)


def _kept(recorded: Contents) -> list[int]:
    """Complete iterations whose states are stored and kept, ascending."""
    synced, states = _by_iteration(recorded, _last_stage(recorded)), _by_iteration(recorded, Stage.TRAIN)
    return sorted(at for at, state in states.items() if state.parts and state.key in recorded.kept and at in synced)


def _last_stage(recorded: Contents) -> Stage:
    """Stage that completes an iteration: a run on stored samples serves no weights."""
    return Stage.TRAIN if _by_iteration(recorded, Stage.SELECT) else Stage.WEIGHT_SYNC


def _best(recorded: Contents, run: str, kept: list[int], measure: str) -> Chosen:
    found = _by_iteration(recorded, Stage.EVALUATE)
    if not (evaluated := {at: found[at] for at in kept if at in found}):
        fact = f"run {run!r} has no evaluation of an iteration whose state is kept ({kept})"
        raise InputError(f"{fact}: choose one as {run}@ITERATION")
    newest, metric = evaluated[max(evaluated)], _METRICS.get(measure, f"reward/{measure}")
    alike = {at: one for at, one in evaluated.items() if _judged_by(one, measure) == _judged_by(newest, measure)}
    values = {at: value for at, one in alike.items() if (value := one.metrics.get(metric)) is not None}
    if not values or (measure == PASSES and _by_chance(newest, evaluated.values())):
        raise InputError(_no_measure(run, measure, newest))
    best = max(sorted(values), key=lambda at: values[at])
    name = f"held-out pass rate ({newest.facts.get(PASS)})" if measure == PASSES else f"held-out {metric}"
    others = sorted(evaluated.keys() - values.keys())
    apart = f"; {others} are judged by another reward function or condition, and not compared" if others else ""
    return Chosen(run, best, recorded, f"the best of {sorted(values)} by {name}: {values[best]:.4g}{apart}")


def _no_measure(run: str, measure: str, newest: Manifest) -> str:
    parts = sorted(name.removeprefix("reward/") for name in newest.metrics if name.startswith("reward/"))
    others = [f"{run}@{BEST}.reward for the mean reward", *(f"{run}@{BEST}.{part}" for part in parts)]
    why = "has no pass rate, because it is not known which answers pass" if measure == PASSES else f"has no {measure}"
    repair = '. For a pass rate set evaluate.pass, as in "right >= 1"' if measure == PASSES else ""
    return f"run {run!r} {why}, so it has no best by that: name another measure, as {', '.join(others)}{repair}"


def _judged_by(evaluated: Manifest, measure: str) -> list[JsonValue]:
    """Facts of an evaluation that make its figures comparable: equal for the same reward, prompts and condition."""
    return [evaluated.facts.get(name) for name in (SCORED_BY, ASKED, *([PASS] if measure == PASSES else []))]


def _by_chance(newest: Manifest, evaluated: Iterable[Manifest]) -> bool:
    """True if a reward that can take other values than 0 and 1 took only these in the newest evaluation."""
    by = newest.facts.get(SCORED_BY)
    return newest.facts.get(PASS) == EXACT and any(
        one.facts.get(SCORED_BY) == by and one.facts.get(PASS) is None for one in evaluated
    )


def _by_iteration(recorded: Contents, stage: Stage) -> dict[int, Manifest]:
    return {manifest.iteration: manifest for manifest in recorded.newest if manifest.stage == stage}
