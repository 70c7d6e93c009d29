"""Counts of the fuzz of the real stack: what is stored of open responses, and what of it is asked for again."""

import numpy as np
import pytest

from infra.fuzz_asked import Asked, open_tokens, read_journal
from infra.fuzz_stack import Kill
from storage import layout
from storage.backends.root import open_root
from storage.parts import PartWriter
from storage.unfinished import Grown, IncrementRecord, keep_increment, keep_piece
from tasks.engine.protocol import NOTHING, Begun
from tasks.stages.names import Stage

RUN = "run"
PIECE = layout.piece_key(RUN, 1, Stage.ROLLOUT, 0, "a")


def begun(count):
    return Begun(np.zeros(count, np.int32), np.zeros(count, np.float32))


@pytest.fixture
def stored(tmp_path):
    """Two increments of row 0, which had 4 tokens before, with a token twice, and one of row 2."""
    root = open_root(str(tmp_path / "root"))
    for number, rows in enumerate([[(0, 4, 3), (2, 0, 2)], [(0, 6, 2)]]):
        grown = [Grown(row, first, *begun(count)) for row, first, count in rows]
        keep_increment(root, PIECE, number, IncrementRecord.of(grown, 1))
    return root


@pytest.mark.parametrize(
    ("rows", "again"), [((8, 0, 2), 0), ((9, 3, 2), 0), ((7, 0, 2), 1), ((4, 0, 0), 6), ((0, 0, 2), 4), (None, 6)]
)
def test_a_stored_token_that_an_engine_is_to_sample_again_is_counted(stored, rows, again):
    asked = Asked.of(stored, PIECE, () if rows is None else [begun(count) for count in rows])
    assert asked == Asked(piece=PIECE, stored=6, again=again)


def test_the_tokens_of_a_piece_are_open_until_it_is_complete(stored):
    assert open_tokens(stored, RUN) == {PIECE: 6}
    writer = PartWriter(stored, RUN, 1, Stage.ROLLOUT)
    keep_piece(writer, "a", writer.write_bytes("a.arrow", b"whatever"))
    assert open_tokens(stored, RUN) == {}


def test_what_became_of_the_tokens_that_were_open_at_a_kill(stored, tmp_path):
    assert Asked.of(stored, "other", [NOTHING]) == Asked(piece="other", stored=0, again=0)
    before, journal = Asked(piece=PIECE, stored=0, again=0), tmp_path / "asked.jsonl"
    assert list(read_journal(journal)) == []
    for after, went_on, again in ((Asked(piece=PIECE, stored=7, again=0), 7, 0), (before, 0, 6)):
        journal.write_text(f"{before.model_dump_json()}\n{after.model_dump_json()}\n")
        assert Kill("now", {PIECE: 6}, 1).told(list(read_journal(journal))) == (6, went_on, again)
    assert Kill("now", {PIECE: 6}, 2).told([before, before]) == (6, 0, 0)
