"""Responses of a rollout that go on, stored before they end: a process that takes over goes on with them."""

from collections.abc import Callable, Sequence

import pyarrow as pa

from storage.backends.root import Root
from storage.unfinished import Grown, IncrementRecord, find_increments, keep_increment, listed_increments
from tasks.engine.protocol import Begun, Every, Increment, Sampling
from tasks.stages.stage import Work
from tasks.workers.engines import EngineHandle
from tasks.workers.sampling import Batch, Growing, sample


class Growth:
    """The increments of some pieces, by the place of a piece among them."""

    def __init__(self, root: Root, pieces: Sequence[str]) -> None:
        """Find what earlier processes have stored of the pieces with these keys."""
        self._root, self.pieces = root, pieces
        self._stored = find_increments(root, pieces)
        self._next = [len(records) for records in self._stored]

    def begun(self, place: int, before: Sequence[Begun]) -> list[Begun]:
        """The beginnings of the responses of a piece, which were there `before` it."""
        begun = list(before)
        for record in self._stored[place]:
            for one in record.grown():
                if one.first == len(begun[one.row].tokens):  # else another process was ahead of its writer
                    begun[one.row] = begun[one.row].grown(Begun(one.tokens, one.logprobs))
        return begun

    def keep(self, place: int, increments: Sequence[Increment]) -> None:
        """Store increments of a piece, all of one weight version."""
        self._next[place] = keep_increment(self._root, self.pieces[place], self._next[place], _record(increments))


def sample_batches(
    work: Work,
    engines: Sequence[EngineHandle],
    batches: Sequence[Batch],
    how: Sampling,
    ready: Callable[[int, pa.RecordBatch], None],
    version: int,
    growth: Growth | None,
) -> None:
    """`sample` as the run's configuration says, with increments that are kept as `growth`."""
    every, ahead = work.config.rollout.increments, 2 * work.config.engine.max_num_seqs
    growing = Growing(Every(every.tokens, every.seconds), growth.keep) if growth else None
    sample(engines, batches, how, ready, ahead, lambda _: work.context.go_on(), version, growing)


def keep_left(root: Root, engines: Sequence[EngineHandle]) -> None:
    """Store what engines have sampled of pieces for which nobody waits any more: others go on from there."""
    for engine in engines:
        for piece, left in engine.drop().items():
            keep_increment(root, piece, len(listed_increments(root, piece).get(piece, [])), _record(left))


def _record(increments: Sequence[Increment]) -> IncrementRecord:
    grown = [Grown(one.row, one.first, *one.grown) for one in increments]
    return IncrementRecord.of(grown, increments[0].weight_version)
