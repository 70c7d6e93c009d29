"""The newest iterations of a run, and how it began, at a cost that does not grow with its length.

Beyond a listing of the iterations (one request for a thousand of them) it takes some forty requests for any run.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from flows.views.changes import Changes, changes_of, judged_by
from flows.views.history import (
    IterationRecord,
    continues_with,
    read_history,
    read_iteration,
    record_of,
    synced_iterations,
)
from flows.views.retrained import last_iteration, next_iteration_of
from flows.views.table import EVALUATED_BY
from storage import layout
from storage.backends.root import Root
from storage.manifest import Manifest, find
from storage.parallel import each
from storage.revisions import Revisions
from tasks.config.evaluation import PASS, SCORED_BY
from tasks.config.run import RunConfig
from tasks.stages.names import Stage

SHORT = 20
"""A run with at most so many iterations is read as a whole."""
_NEWEST = 4
_READERS = 4


@dataclass(frozen=True)
class Newest:
    """What is known of a run without reading all of it."""

    records: tuple[IterationRecord, ...]
    """The newest iterations that have begun, or all."""
    first: int
    """The first iteration that is not complete."""
    last: int
    """The last iteration that was asked for, or that has begun."""
    changes: Changes
    """Its figures, from the first values to the last."""


def read_newest(root: Root, run: str, config: RunConfig, revisions: Revisions, whole: bool = False) -> Newest:
    """Read the newest iterations of a run, and its first figures. One on stored samples is read as a whole.

    Args:
        config: says how many iterations there are to be, and when an evaluation is due.
        revisions: of the run.
        whole: read all iterations, however many there are.
    """
    asked, every = last_iteration(root, run, config), config.evaluate.every
    begun = max(_begun(root, run), default=-1) + 1
    if whole or begun <= SHORT or config.retrain is not None:
        history = read_history(root, run, revisions)
        last = max(asked, len(history) - 1)
        return Newest(tuple(history), next_iteration_of(history, last, config), last, changes_of(history))
    synced, last = _synced(root, run, begun, revisions), max(asked, begun - 1)
    records = _window(root, run, range(synced - _NEWEST, min(synced + 1, begun)), revisions)
    evaluated = {one.iteration for one in records if Stage.EVALUATE in one.done}
    first = continues_with(synced, lambda iteration: iteration in evaluated, last, every)
    begun_at = _Earlier(root, run, revisions, records)
    earlier = [*begun_at.alike(Stage.REWARD, range(1, records[0].iteration), (SCORED_BY,))]
    if every:
        evaluations = range(0, records[0].iteration, every)
        earlier += begun_at.alike(Stage.EVALUATE, evaluations[-1:], ())
        for by in ((EVALUATED_BY,), (EVALUATED_BY, PASS)):
            earlier += begun_at.alike(Stage.EVALUATE, evaluations, by)
    earlier.sort(key=lambda one: one.iteration)
    return Newest(tuple(records), first, last, changes_of([*earlier, *records]))


@dataclass(frozen=True)
class _Earlier:
    """Iterations before the newest ones."""

    root: Root
    run: str
    revisions: Revisions
    newest: list[IterationRecord]

    def alike(self, stage: Stage, numbers: range, by: Sequence[str]) -> list[IterationRecord]:
        """The first of some iterations, and if the newest is judged by something else, the first that is judged alike.

        That takes O(log(iterations)) requests. Of each the record has this stage only.
        """
        found = [self.record(number, stage) for number in numbers[:1]]
        last = next((judged_by(one, by) for one in reversed(self.newest) if stage in one.done), None)
        if found and last is not None and (found[0] is None or judged_by(found[0], by) != last):
            place = bisect.bisect_left(
                numbers, True, key=lambda at: (one := self.record(at, stage)) is not None and judged_by(one, by) == last
            )
            found += [self.record(number, stage) for number in numbers[place : place + 1]]
        return [one for one in found if one is not None]

    def record(self, iteration: int, stage: Stage) -> IterationRecord | None:
        """One stage of an iteration; None if it is not done."""
        manifest = find(self.root, self.run, iteration, stage, self.revisions)
        return None if manifest is None else record_of([manifest], None)


def _begun(root: Root, run: str) -> list[int]:
    found = (layout.iteration_of(name) for name in root.folders(layout.manifest_folder(run)))
    return [number for number in found if number is not None]


def _synced(root: Root, run: str, begun: int, revisions: Revisions) -> int:
    """How many iterations have their weights synced: nearly always all that have begun, or all but one."""
    for number in (begun, begun - 1):
        if find(root, run, number - 1, Stage.WEIGHT_SYNC, revisions) is not None:
            return number
    return synced_iterations(root, run, begun)


def _window(root: Root, run: str, numbers: range, revisions: Revisions) -> list[IterationRecord]:
    """The records of iterations, but of the first, from whose end the second is timed."""
    found = each(lambda number: read_iteration(root, run, number, revisions), numbers, _READERS)
    records: list[IterationRecord] = []
    before: Manifest | None = found[0][-1] if found[0] else None
    for manifests in filter(None, found[1:]):
        records.append(record_of(manifests, before))
        before = manifests[-1]
    return records
