"""The newest iterations of a run, and how it began, at a cost that does not grow with its length.

Beyond a listing of the iterations (one request for a thousand of them) it takes some forty requests for any run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from flows.views.history import (
    IterationRecord,
    continues_with,
    first_and_last,
    read_history,
    read_iteration,
    record_of,
    synced_iterations,
)
from flows.views.retrained import last_iteration, next_iteration_of
from storage import layout
from storage.backends.root import Root
from storage.manifest import Manifest, find
from storage.parallel import each
from storage.revisions import Revisions
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
    rewards: tuple[float | None, float | None]
    """The first and the last."""
    accuracies: tuple[float | None, float | None]
    """The first and the last."""


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
        return _of(history, [], [], next_iteration_of(history, last, config), last)
    synced, last = _synced(root, run, begun, revisions), max(asked, begun - 1)
    records = _window(root, run, range(synced - _NEWEST, min(synced + 1, begun)), revisions)
    evaluated = {one.iteration for one in records if Stage.EVALUATE in one.done}
    first = continues_with(synced, lambda iteration: iteration in evaluated, last, every)
    metric = partial(_metric, root, run, revisions)
    rewards = [metric(1, Stage.REWARD, "reward_mean")]
    measured = [
        metric(number, Stage.EVALUATE, "accuracy")
        for number in _evaluations(synced - 1, every)
        if number < records[0].iteration
    ]
    return _of(records, rewards, measured, first, last)


def _of(
    records: Iterable[IterationRecord],
    rewards: list[float | None],
    accuracies: list[float | None],
    first: int,
    last: int,
) -> Newest:
    chosen = tuple(records)
    return Newest(
        records=chosen,
        first=first,
        last=last,
        rewards=first_and_last([*rewards, *(one.reward for one in chosen)]),
        accuracies=first_and_last([*accuracies, *(one.accuracy for one in chosen)]),
    )


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


def _evaluations(last: int, every: int) -> list[int]:
    """The first iteration that was evaluated, and the last that was due."""
    return [0, last - last % every] if every else []


def _metric(root: Root, run: str, revisions: Revisions, iteration: int, stage: Stage, name: str) -> float | None:
    manifest = find(root, run, iteration, stage, revisions)
    return None if manifest is None else manifest.metrics.get(name)
