"""Copies of a bucket's tensors to the place that the model's table names, in every form in which they lie there."""

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["float32", "bfloat16"])
@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "of",
    [
        ((0, 8), (0, 12)),  # all of it
        ((2, 6), (0, 12)),  # rows
        ((0, 8), (4, 8)),  # columns
        ((1, 4), (1, 4)),  # both, and no whole words
        ((3, 4), (2, 7)),
        ((0, 0), (0, 12)),  # nothing
    ],
)
def test_parts_are_copied_to_their_places(engines, sent, held, of):
    assert engines["qwen3", False].process.Copies().right(sent, held, of)


def test_what_this_worker_does_not_hold_is_left_out(engines):
    assert engines["qwen3", False].process.Copies().right("float32", "float32", None)
