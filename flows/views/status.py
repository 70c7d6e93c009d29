"""The state of a run, from storage alone: imports no torch, Ray, vLLM or Prefect.

Of a long run the newest iterations and the first comparable values are read: beyond listings of the iterations and of
all names (one request for a thousand of them) some forty requests for any run."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from flows.views.history import (
    PLOT,
    IterationRecord,
    evaluation_due,
    history_of,
    last_iteration,
    manifests_of,
    next_after,
    record_of,
    run_troubles,
    seconds_per_iteration,
    wanted_stages,
    workflow_of,
)
from flows.views.table import EVALUATED_BY
from storage import layout
from storage.backends.root import Root
from storage.ids import check_run_name
from storage.manifest import Manifest, load
from storage.parallel import each
from storage.revisions import read_revisions
from storage.upkeep.catalog import Names, names
from storage.upkeep.holes import hole
from storage.upkeep.redoing import unfinished
from tasks.config.evaluation import EXACT, PASS, SCORED_BY
from tasks.config.run import RunConfig
from tasks.config.stored import read_config
from tasks.stages.names import Stage

SHORT = 20  # a run with at most so many iterations is read as a whole
_NEWEST = 4
_READERS = 4


class Change(BaseModel, frozen=True, extra="forbid"):
    """The first and the last value that one reward, and one way of asking, have given."""

    first: float | None = None
    last: float | None = None
    since: int | None = None  # iteration of `first`
    apart: bool = False  # True if there are earlier values, of another reward function or of other limits


class Changes(BaseModel, frozen=True, extra="forbid"):
    reward: Change  # mean reward of the samples
    held_out_reward: Change  # mean reward of greedy answers to held-out prompts
    pass_rate: Change  # share of these answers that pass
    passing: str | None


def changes_of(records: Sequence[IterationRecord]) -> Changes:
    """The changes over records in their order, which need not be those of all iterations."""
    evaluated = [one for one in records if one.held_out_reward is not None]
    passing = evaluated[-1].passing if evaluated else None
    unknown = passing is None or _by_chance(evaluated)
    return Changes(
        reward=_change(records, lambda one: one.reward, SCORED_BY),
        held_out_reward=_change(evaluated, lambda one: one.held_out_reward, EVALUATED_BY),
        pass_rate=Change() if unknown else _change(evaluated, lambda one: one.pass_rate, EVALUATED_BY, PASS),
        passing=passing,
    )


def judged_by(record: IterationRecord, by: Sequence[str]) -> list[str | None]:
    """Key of comparability of a record's values, from columns of text: equal for values that may be compared."""
    return [record.row.texts.get(name) for name in by]


def apart_lines(changes: Changes) -> list[str]:
    """A sentence for each figure of which earlier values are not compared."""
    named = {"mean reward": changes.reward, "held-out evaluation": changes.held_out_reward}
    why = "are of another reward function, or of other prompts; they are not compared"
    apart = {name: change.since for name, change in named.items() if change.apart}
    return [f"{name}: values before iteration {since} {why}" for name, since in apart.items()]


def _change(records: Sequence[IterationRecord], value: Callable[[IterationRecord], float | None], *by: str) -> Change:
    there = [(one, found) for one in records if (found := value(one)) is not None]
    if not there:
        return Change()
    keys = [judged_by(one, by) for one, _ in there]
    first, last = there[keys.index(keys[-1])], there[-1]
    return Change(first=first[1], last=last[1], since=first[0].iteration, apart=first is not there[0])


def _by_chance(evaluated: Sequence[IterationRecord]) -> bool:
    """True if graded rewards happened to be only 0 and 1 once: then it is not known which answers pass."""
    by = [judged_by(one, (EVALUATED_BY,)) for one in evaluated]
    return {one.passing for one, key in zip(evaluated, by, strict=True) if key == by[-1]} >= {None, EXACT}


class StageStatus(BaseModel, frozen=True, extra="forbid"):
    stage: Stage
    done: bool


class RunStatus(BaseModel, frozen=True, extra="forbid"):
    run: str
    root: str
    iterations: int  # RL iterations that are complete
    asked: int  # RL iterations that the run was started with, or that it has, if a continuation has asked for more
    complete: bool  # True if all requested iterations are done, and no stage is lost
    revision: int = 0  # the head: the revision that all of this is about. It rises when a finished stage is done again.
    redoing: str | None = None  # the finished stage that is being done again, if that is not finished
    current: int | None  # the iteration that it continues with; None if all are complete, or a stage is lost
    stages: tuple[StageStatus, ...]
    changes: Changes
    """Mean reward, held-out mean reward and held-out pass rate, from the first value to the last that compare."""
    seconds_per_iteration: float | None  # median duration of the iterations in `history` after the second
    warnings: tuple[str, ...]
    """A lost stage, signs in `history` that the run may not learn, and figures that are not compared; a line each."""
    report: str | None  # URL of the plot, once there is one
    history: tuple[IterationRecord, ...]  # the iterations that have begun: all, or of a long run the newest


def read_status(root: Root, run: str, whole: bool = False) -> RunStatus:
    """Read what a run has done and what comes next; of a long run, unless `whole`, only its first figures and its
    newest iterations. Raises InputError if there is no such run."""
    revisions = read_revisions(root, check_run_name(run))
    config = read_config(root, run, revisions).config
    begun = unfinished(root, run, revisions)
    recorded = names(root, run, revisions=revisions)
    # a continued run may have more iterations than it was started with
    found = read_newest(root, run, config, recorded, whole)
    lost = hole(root, workflow_of(config), run, recorded, config.rollout.ahead)
    troubles = [(one.iteration, one.troubles) for one in found.records if Stage.ROLLOUT in one.done]
    going_on, key = found.first <= found.last and lost is None, layout.report_key(run, PLOT)
    return RunStatus(
        run=run,
        root=root.url,
        iterations=max((found.first if lost is None else lost[0]) - 1, 0),
        asked=max(found.first - 1, last_iteration(root, run, config)),
        complete=not going_on and lost is None,
        revision=revisions.head,
        redoing=None if begun is None else f"{begun}, as revision {begun.revision} ({begun.reason})",
        current=found.first if going_on else None,
        stages=_stages(found.records, found.first, found.last, config) if going_on else (),
        changes=found.changes,
        seconds_per_iteration=seconds_per_iteration(found.records),
        warnings=(*(lost or ())[1:], *run_troubles(troubles), *apart_lines(found.changes)),
        report=f"{root.url}/{key}" if root.exists(key) else None,
        history=found.records,
    )


def _stages(
    history: Sequence[IterationRecord], iteration: int, last: int, config: RunConfig
) -> tuple[StageStatus, ...]:
    done, every = next((one.done for one in history if one.iteration == iteration), ()), config.evaluate.every
    stages = wanted_stages(config, iteration)
    wanted = [stage for stage in stages if stage != Stage.EVALUATE or evaluation_due(iteration, last, every)]
    return tuple(StageStatus(stage=stage, done=stage in done) for stage in wanted)


@dataclass(frozen=True)
class Newest:
    """The state of a run, without reading all of it."""

    records: tuple[IterationRecord, ...]  # the newest iterations that have begun, or all
    first: int
    last: int  # the last iteration that is requested or has begun
    changes: Changes


def read_newest(root: Root, run: str, config: RunConfig, recorded: Names, whole: bool = False) -> Newest:
    """Read the newest iterations of a run, and its first figures; all if `whole`, or if it trains on stored samples."""

    def done(iteration: int, stage: str) -> bool:
        return (iteration, stage) in recorded.newest

    numbers = map(layout.iteration_of, root.folders(layout.manifest_folder(run)))
    begun = max((number for number in numbers if number is not None), default=-1) + 1
    ends, every = workflow_of(config).ends_iteration, config.evaluate.every
    ended = next(number for number in itertools.count() if not done(number, ends))
    last = max(last_iteration(root, run, config), begun - 1)
    first = next_after(ended, last, config, done)
    if whole or begun <= SHORT or config.retrain is not None:
        history = history_of(root, recorded)
        return Newest(tuple(history), first, last, changes_of(history))
    records = _window(root, recorded, range(ended - _NEWEST, min(ended + 1, begun)))
    begun_at, shown = _Earlier(root, recorded, records), max(ended - _NEWEST + 1, 0)
    earlier = [*begun_at.alike(Stage.REWARD, range(1, shown), (SCORED_BY,))]
    if every:
        evaluations = range(0, shown, every)
        earlier += begun_at.alike(Stage.EVALUATE, evaluations[-1:], ())
        for by in ((EVALUATED_BY,), (EVALUATED_BY, PASS)):
            earlier += begun_at.alike(Stage.EVALUATE, evaluations, by)
    earlier.sort(key=lambda one: one.iteration)
    return Newest(tuple(records), first, last, changes_of([*earlier, *records]))


@dataclass(frozen=True)
class _Earlier:
    root: Root
    recorded: Names
    newest: list[IterationRecord]

    def alike(self, stage: Stage, numbers: range, by: Sequence[str]) -> list[IterationRecord]:
        """The first iteration, and if the newest one is judged by something else, the first that is judged like it.

        That takes O(log(iterations)) requests. Each record has this stage only."""
        found = [self.record(number, stage) for number in numbers[:1]]
        last = next((judged_by(one, by) for one in reversed(self.newest) if stage in one.done), None)
        if found and last is not None and (found[0] is None or judged_by(found[0], by) != last):
            place = bisect.bisect_left(
                numbers, True, key=lambda at: (one := self.record(at, stage)) is not None and judged_by(one, by) == last
            )
            found += [self.record(number, stage) for number in numbers[place : place + 1]]
        return [one for one in found if one is not None]

    def record(self, iteration: int, stage: Stage) -> IterationRecord | None:
        key = self.recorded.newest.get((iteration, stage))
        return None if key is None else record_of([load(self.root, key)], None)


def _window(root: Root, recorded: Names, numbers: range) -> list[IterationRecord]:
    """Records of the iterations after the first, whose end is needed to time the second."""
    found = each(lambda number: manifests_of(root, recorded, number), numbers, _READERS)
    records: list[IterationRecord] = []
    before: Manifest | None = found[0][-1] if found[0] else None
    for manifests in filter(None, found[1:]):
        records.append(record_of(manifests, before))
        before = manifests[-1]
    return records
