"""Responses of a rollout that go on, stored before they end: a process that takes over goes on with them."""

from collections.abc import Sequence

from storage.parts import PartWriter
from storage.unfinished import Grown, IncrementRecord, find_increments, keep_increment
from tasks.engine.protocol import NOTHING, Begun, Increment


class Growth:
    """The increments of some pieces, by the place of a piece among them."""

    def __init__(self, writer: PartWriter, pieces: Sequence[str]) -> None:
        """Find what earlier processes have stored of them."""
        self._writer, self._pieces = writer, pieces
        self._stored = [find_increments(writer, piece) for piece in pieces]
        self._next = [len(records) for records in self._stored]

    def begun(self, place: int, rows: int) -> list[Begun]:
        """The beginnings of the responses of a piece with so many samples."""
        begun = [NOTHING] * rows
        for record in self._stored[place]:
            for one in record.grown():
                if one.first == len(begun[one.row].tokens):  # else another process was ahead of its writer
                    begun[one.row] = begun[one.row].grown(Begun(one.tokens, one.logprobs))
        return begun

    def keep(self, place: int, increments: Sequence[Increment]) -> None:
        """Store increments of a piece, all of one weight version."""
        record = IncrementRecord.of(
            [Grown(one.row, one.first, *one.grown) for one in increments], increments[0].weight_version
        )
        self._next[place] = keep_increment(self._writer, self._pieces[place], self._next[place], record)
