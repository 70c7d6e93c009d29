"""Command line of `ratchet`, with a journal of what the engines are asked for.

It has each batch of a rollout, with the number of tokens that increments, or the piece, had of its responses, and how
many of those the engine is to sample again.

    python -m infra.fuzz_asked JOURNAL ROOT WORDS ...

The counts are made from the records and from the calls alone, whatever the rollout believes to be stored.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flows.__main__ import main as ratchet
from storage import layout
from storage.backends.root import Root, open_root
from storage.parts import read_parts
from storage.schema import ROLLOUT
from storage.unfinished import find_increments, read_piece
from storage.upkeep.catalog import names
from tasks.engine.protocol import Begun
from tasks.workers.interface import EngineHandle


class Asked(BaseModel, frozen=True):
    """Batch that an engine is asked for."""

    piece: str
    """Key of the piece."""
    stored: int
    """Tokens of its responses that were stored since the piece was begun."""
    again: int
    """Of these, tokens that the engine is to sample again."""

    @classmethod
    def of(cls, root: Root, piece: str, begun: Sequence[Begun]) -> "Asked":
        """The batch of a piece with these beginnings of its responses; without any, they begin at their first token."""
        spans = stored_spans(root, piece)
        there = {row: len(begun[row].tokens) if len(begun) else 0 for row in spans}
        again = sum(max(0, end - max(first, there[row])) for row, (first, end) in spans.items())
        return cls(piece=piece, stored=sum(end - first for first, end in spans.values()), again=again)


def stored_spans(root: Root, piece: str) -> dict[int, tuple[int, int]]:
    """First and last place of the stored tokens of each response of a piece, by row."""
    if root.exists(piece):
        lengths = read_parts(root, [read_piece(root, piece)], ROLLOUT)["response_tokens"].combine_chunks()
        return {row: (0, length) for row, length in enumerate(lengths.value_lengths().to_pylist())}
    spans: dict[int, tuple[int, int]] = {}
    for record in find_increments(root, [piece])[0]:
        for one in record.grown():
            first, end = spans.get(one.row, (one.first, one.first))
            spans[one.row] = min(first, one.first), max(end, one.first + len(one.tokens))
    return spans


def open_tokens(root: Root, run: str) -> dict[str, int]:
    """Tokens that increments have of pieces which are not complete, by the key of the piece."""
    found = names(root, run)
    pieces = {layout.piece_of_increment(key) for key in found.increments} - {None, *found.pieces}
    opened = {piece: stored_spans(root, piece) for piece in map(str, pieces)}
    return {piece: sum(end - first for first, end in spans.values()) for piece, spans in opened.items()}


def noting(root: Root, note: Callable[[Asked], object], enqueue: Callable[..., None]) -> Callable[..., None]:
    """An engine's `enqueue` that notes before what it is asked for, if the batch belongs to a piece."""

    def noted(
        self: Any, number: int, prompts: Any, seeds: Any, how: Any, begun: Any = (), every: Any = None, name: str = ""
    ) -> None:
        if name:
            note(Asked.of(root, name, begun))
        enqueue(self, number, prompts, seeds, how, begun, every, name)

    return noted


def read_journal(path: Path) -> Iterator[Asked]:
    """Batches in the order in which they were asked for."""
    return map(Asked.model_validate_json, path.read_text().splitlines() if path.exists() else ())


def main() -> None:
    """Run the command line of this process with the journal."""
    journal, url, *words = sys.argv[1:]
    sys.argv[1:] = words

    def note(asked: Asked) -> None:
        with Path(journal).open("a") as file:
            file.write(f"{asked.model_dump_json()}\n")

    EngineHandle.enqueue = noting(open_root(url), note, EngineHandle.enqueue)
    ratchet()


if __name__ == "__main__":
    main()
