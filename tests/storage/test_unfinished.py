"""Pieces of a stage in progress."""

import numpy as np
import pytest

from storage import layout
from storage.errors import DigestMismatch, WrongRecord
from storage.parts import PartWriter
from storage.unfinished import (
    Grown,
    IncrementRecord,
    TurnEvent,
    TurnsRecord,
    find_increments,
    find_piece,
    find_turns,
    keep_increment,
    keep_piece,
    lost_increments,
    piece_key,
)
from tasks.stages.names import Stage


def test_a_piece_is_found_again_by_name(any_root):
    writer = PartWriter(any_root, "run", 1, Stage.ROLLOUT)
    assert find_piece(writer, "00000") is None
    part = writer.write_bytes("groups-00000.arrow", b"content", rows=3)
    assert keep_piece(writer, "00000", part) == part
    assert find_piece(writer, "00000") == part
    assert find_piece(PartWriter(any_root, "run", 2, Stage.ROLLOUT), "00000") is None


def test_the_first_of_two_writers_of_a_piece_counts_for_both(any_root):
    writer = PartWriter(any_root, "run", 1, Stage.ROLLOUT)
    first, second = (writer.write_bytes("groups-00000.arrow", data) for data in (b"one", b"two"))
    assert keep_piece(writer, "00000", first) == first
    assert keep_piece(writer, "00000", second) == first


def test_a_damaged_record_of_a_piece_is_refused(root):
    writer = PartWriter(root, "run", 1, Stage.ROLLOUT)
    keep_piece(writer, "00000", writer.write_bytes("groups-00000.arrow", b"content"))
    key = layout.piece_key("run", 1, Stage.ROLLOUT, 0, "00000")
    root.replace(key, root.read_bytes(key).replace(b'"bytes": 7', b'"bytes": 8'))
    with pytest.raises(DigestMismatch, match=key):
        find_piece(writer, "00000")


def grown(*tokens, row=0, first=0):
    return Grown(row, first, np.array(tokens, np.int32), -np.array(tokens, np.float32) / 3)


def test_increments_are_found_again_in_order(any_root):
    piece = layout.piece_key("run", 1, Stage.ROLLOUT, 0, "a")
    assert piece == piece_key(PartWriter(any_root, "run", 1, Stage.ROLLOUT), "a")
    assert find_increments(any_root, [piece]) == [[]]
    some = [[grown(5, 6), grown(7, row=3)], [grown(2**31 - 1, first=2), grown(row=1)]]
    made = [IncrementRecord.of(one, 4) for one in some]
    assert [keep_increment(any_root, piece, number, one) for number, one in enumerate(made)] == [1, 2]
    assert find_increments(any_root, [piece]) == [made]
    for record, expected in zip(made, some, strict=True):
        for mine, theirs in zip(record.grown(), expected, strict=True):
            assert mine[:2] == theirs[:2]
            for one, other in zip(mine[2:], theirs[2:], strict=True):
                assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    others = ((Stage.ROLLOUT, 0, "b"), (Stage.ROLLOUT, 1, "a"), (Stage.REWARD, 0, "a"))
    assert find_increments(any_root, [layout.piece_key("run", 1, *one) for one in others]) == [[], [], []]


def test_an_increment_of_another_process_is_kept(any_root):
    piece = layout.piece_key("run", 1, Stage.ROLLOUT, 0, "a")
    theirs, ours = (IncrementRecord.of([grown(token)], 4) for token in (1, 2))
    assert keep_increment(any_root, piece, 0, theirs) == 1
    assert keep_increment(any_root, piece, 0, theirs) == 1  # its own write, whose answer was lost
    assert keep_increment(any_root, piece, 0, ours) == 2
    assert find_increments(any_root, [piece]) == [[theirs, ours]]


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("turns", [False, True])
def test_an_increment_that_is_lost_is_not_taken_for_the_end(root, lost, turns):
    piece = layout.piece_key("run", 1, Stage.ROLLOUT, 0, "a")
    event = TurnsRecord(events=(TurnEvent(row=0, kind="begun"),))
    for number in range(3):
        one = event if turns else IncrementRecord.of([grown(number, first=number)], 4)
        keep_increment(root, piece, number, one)
    key = layout.increment_key(piece, lost, turns)
    root.remove(key)

    def read():
        return find_turns(root, piece) if turns else find_increments(root, [piece])[0]

    assert lost_increments(root.keys("run")) == ([] if lost == 2 else [key])
    if lost == 2:  # the end may be lost with what it knew, as by a kill
        assert len(read()) == 2
        return
    with pytest.raises(WrongRecord, match=f"{key} is missing") as refused:
        read()
    folder = str(refused.value).partition("or remove ")[2].partition(": ")[0]
    for other in root.keys(folder.removeprefix(f"{root.url}/")):
        root.remove(other)
    assert read() == []


@pytest.mark.parametrize("harm", ["flipped", "copied"])
def test_an_increment_with_other_tokens_is_refused_and_not_taken_for_the_end(root, harm):
    piece, other = (layout.piece_key("run", 1, Stage.ROLLOUT, 0, name) for name in ("a", "b"))
    for number in range(3):
        keep_increment(root, piece, number, IncrementRecord.of([grown(number, first=number)], 4))
    keep_increment(root, other, 0, IncrementRecord.of([grown(9, first=1)], 4))
    key, source = layout.increment_key(piece, 1), layout.increment_key(other, 0)
    flipped = root.read_bytes(key).replace(b'"tokens": "AQ', b'"tokens": "Ag')
    assert flipped != root.read_bytes(key)
    root.replace(key, flipped if harm == "flipped" else root.read_bytes(source))
    with pytest.raises(DigestMismatch if harm == "flipped" else WrongRecord, match=key):
        find_increments(root, [piece])


def test_the_key_of_an_increment_names_its_piece():
    piece = layout.piece_key("run", 1, Stage.ROLLOUT, 2, "000-004.a")
    key = layout.increment_key(piece, 7)
    assert layout.piece_of_increment(key) == piece
    assert layout.piece_of_increment(layout.piece_key("run", 1, Stage.ROLLOUT, 2, "a")) is None
    assert not layout.is_piece(key) and not layout.is_stray(key)
