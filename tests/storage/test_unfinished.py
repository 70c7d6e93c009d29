"""Pieces of a stage in progress."""

import pytest

from storage import layout
from storage.errors import DigestMismatch
from storage.parts import PartWriter
from storage.unfinished import find_piece, keep_piece
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
