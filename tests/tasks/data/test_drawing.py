"""Drawn prompts follow from the cursor alone, in passes and as a mixture."""

import numpy as np
import pytest

from storage.errors import InputError
from tasks.data.drawing import Share, draw, repetitions, whole_weights

THREE_TO_ONE = (Share(5, 0.75), Share(4, 0.25))


def test_every_pass_draws_each_prompt_once():
    rows = draw(rows=7, cursor=0, count=21, seed=3, shuffle=True).reshape(3, 7)
    assert [sorted(turn) for turn in rows.tolist()] == [list(range(7))] * 3
    assert rows[0].tolist() != rows[1].tolist()


def test_the_order_of_a_pass_never_changes():
    """Stored runs continue to draw the same prompts."""
    passes = [np.random.default_rng([3, turn]).permutation(7) for turn in range(2)]
    assert draw(rows=7, cursor=0, count=14, seed=3, shuffle=True).tolist() == np.concatenate(passes).tolist()
    assert draw(rows=3, cursor=1, count=4, seed=3, shuffle=False).tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize("shares", [(), THREE_TO_ONE], ids=["passes", "mixture"])
@pytest.mark.parametrize("cursor", [0, 3, 7, 20])
def test_the_cursor_alone_is_the_state(cursor, shares):
    whole = draw(9, 0, 40, 3, True, shares)
    np.testing.assert_array_equal(draw(9, cursor, 5, 3, True, shares), whole[cursor : cursor + 5])


def test_a_mixture_has_its_proportions_in_every_pattern():
    rows = draw(9, 0, 400, 0, True, THREE_TO_ONE)
    assert ((rows < 5).reshape(100, 4).sum(axis=1) == 3).all()


def test_each_source_of_a_mixture_has_its_own_passes():
    rows = draw(9, 0, 400, 0, True, THREE_TO_ONE)
    for mine, count in ((rows[rows < 5], 5), (rows[rows >= 5] - 5, 4)):
        passes = mine[: len(mine) // count * count].reshape(-1, count)
        assert (np.sort(passes, axis=1) == np.arange(count)).all()
        assert len({tuple(turn) for turn in passes.tolist()}) > 1


def test_the_sources_of_a_mixture_have_orders_of_their_own():
    rows = draw(10, 0, 10, 0, True, (Share(5, 1), Share(5, 1)))
    assert rows[rows < 5].tolist() != (rows[rows >= 5] - 5).tolist()


def test_one_source_with_a_weight_is_drawn_like_one_without():
    assert draw(5, 0, 12, 1, True, (Share(5, 3.0),)).tolist() == draw(5, 0, 12, 1, True).tolist()


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([0.7, 0.3], [7, 3]), ([2, 1, 1], [2, 1, 1]), ([1.0, 1.0], [1, 1]), ([0.5, 0.125], [4, 1]), ([30, 20], [3, 2])],
)
def test_weights_as_whole_numbers(weights, counts):
    assert whole_weights(weights) == counts


@pytest.mark.parametrize("weights", [[1.0, 0.00001], [1 / 7, 1 / 11, 1 / 13, 1 / 17, 1 / 19]])
def test_weights_without_a_short_pattern_are_refused(weights):
    with pytest.raises(InputError, match="give small whole numbers"):
        whole_weights(weights)


@pytest.mark.parametrize(
    ("rows", "before"),
    [([], []), ([4, 2, 7], [0, 0, 0]), ([4, 2, 4, 4, 2, 7], [0, 0, 1, 2, 1, 0]), ([1, 1, 1], [0, 1, 2])],
)
def test_repetitions_within_a_draw(rows, before):
    assert repetitions(np.array(rows, dtype=np.int64)).tolist() == before


@pytest.mark.parametrize("shares", [(), THREE_TO_ONE], ids=["passes", "mixture"])
def test_a_draw_over_the_end_of_a_pass_names_every_sample_once(shares):
    rows = draw(9, 6, 12, 0, True, shares)
    assert len(set(rows.tolist())) < len(rows)
    names = set(zip(rows.tolist(), repetitions(rows).tolist(), strict=True))
    assert len(names) == len(rows)
