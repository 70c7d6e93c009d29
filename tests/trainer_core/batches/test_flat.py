import numpy as np
import pytest

from tests.trainer_core.models import examples_of
from trainer_core.batches.flat import alike, flatten
from trainer_core.context_parallel import Context

EXAMPLES = examples_of([([1, 2, 3], [4, 5]), ([6], [7, 8, 9]), ([10, 11], [12])])


def test_sequences_lie_one_after_another_and_each_predicts_its_own_next_token():
    batch = flatten(EXAMPLES, np.array([2, 0]))
    assert batch.rows.tolist() == [2, 0]
    assert batch.tokens.tolist() == [10, 11, 1, 2, 3, 4]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2, 3]
    assert batch.lengths.tolist() == [2, 4]


def test_only_positions_that_predict_the_response_are_predicted():
    batch = flatten(EXAMPLES, np.array([2, 0]))
    assert batch.predicting.tolist() == [1, 4, 5]
    assert batch.targets.tolist() == [12, 4, 5]
    assert batch.response_lengths.tolist() == [1, 2]
    assert batch.responses.tolist() == [5, 0, 1]  # of 4, 5, 7, 8, 9, 12
    assert batch.response_tokens == 3


def test_an_empty_batch_is_one_position_that_counts_nowhere():
    batch = flatten(EXAMPLES, np.array([], dtype=np.int64))
    assert len(batch.tokens) == len(batch.predicting) == len(batch.targets) == 1
    assert batch.response_tokens == 0
    assert batch.rows.tolist() == batch.responses.tolist() == [-1]


def test_batches_become_alike_by_what_counts_nowhere():
    longer, shorter = (flatten(EXAMPLES, np.array(rows)) for rows in ([0, 1], [2]))
    filled = alike([longer, shorter])
    assert len({(len(one.rows), len(one.lengths), len(one.tokens), len(one.targets)) for one in filled}) == 1
    for before, after in zip((longer, shorter), filled, strict=True):
        assert after.lengths.sum() == len(after.tokens) == len(after.positions)
        assert after.response_lengths.sum() == len(after.targets) == len(after.predicting) == len(after.responses)
        assert after.response_tokens == before.response_tokens
        assert after.predicting.max() < len(after.tokens)
        count = len(before.tokens)
        assert after.tokens[:count].tolist() == before.tokens.tolist()
        assert set(after.rows[len(before.rows) :]) == {-1}


def test_batches_that_are_alike_stay_as_they_are():
    batches = [flatten(EXAMPLES, np.array([row])) for row in (0, 0)]
    assert all(after is before for before, after in zip(batches, alike(batches), strict=True))


MANY = examples_of([(list(range(1, 2 + n)), list(range(50, 51 + 2 * n))) for n in (3, 1, 6, 2)])


def shares(rows, ranks, multiple=1):
    return [flatten(MANY, np.array(rows, dtype=np.int64), multiple, Context(ranks, rank)) for rank in range(ranks)]


def test_ranks_hold_the_pieces_from_both_ends():
    """3 positions become 4, a piece each; 12 positions 3 each."""
    first, second = shares([1, 2], 2)
    assert MANY.positions[[1, 2]].tolist() == [4, 19]
    assert first.lengths.tolist() == second.lengths.tolist() == [2, 10]
    assert first.positions.tolist() == [0, 3, *range(5), *range(15, 20)]
    assert second.positions.tolist() == [1, 2, *range(5, 15)]
    assert first.filling.tolist() == [False] * 11 + [True]
    assert not second.filling.any()


@pytest.mark.parametrize(("ranks", "multiple"), [(2, 1), (2, 2), (2, 3), (3, 1), (4, 4)])
def test_every_position_and_every_response_token_is_held_once(ranks, multiple):
    rows = [2, 0, 3]
    whole, parts = flatten(MANY, np.array(rows)), shares(rows, ranks, multiple)
    assert len({len(part.tokens) for part in parts}) == 1
    assert all(len(part.tokens) % multiple == 0 for part in parts)
    assert all(part.lengths.sum() == len(part.tokens) for part in parts)
    assert all(part.response_lengths.sum() == len(part.predicting) for part in parts)
    for number, row in enumerate(rows):
        own = np.flatnonzero(np.repeat(whole.rows, whole.lengths) == row)
        held = [np.flatnonzero((np.repeat(part.rows, part.lengths) == row) & ~part.filling) for part in parts]
        places = np.concatenate([part.positions[at] for part, at in zip(parts, held, strict=True)])
        tokens = np.concatenate([part.tokens[at] for part, at in zip(parts, held, strict=True)])
        assert sorted(places.tolist()) == list(range(whole.lengths[number]))
        assert tokens[np.argsort(places)].tolist() == whole.tokens[own].tolist()
    responses = np.concatenate([part.responses for part in parts])
    predicted = np.concatenate([part.targets for part in parts])
    assert sorted(responses.tolist()) == sorted(whole.responses.tolist())
    assert dict(zip(responses.tolist(), predicted.tolist(), strict=True)) == dict(
        zip(whole.responses.tolist(), whole.targets.tolist(), strict=True)
    )


def test_a_token_is_predicted_where_the_one_before_it_is_held():
    for part in shares([2], 2):
        before = part.tokens[part.predicting]
        # responses are 50, 51, ..., after a prompt that ends with 7
        assert part.targets.tolist() == [50 if token == 7 else token + 1 for token in before.tolist()]


def test_an_empty_batch_has_two_positions_on_each_rank():
    first, second = shares([], 2)
    assert first.filling.all() and second.filling.all()
    assert len(first.tokens) == len(second.tokens) == 2
    assert (len(first.predicting), len(second.predicting)) == (1, 0)
    assert first.response_tokens == second.response_tokens == 0


def test_every_holder_of_a_position_finds_it_again():
    held = np.full(24, 8)
    ranks, places = Context(3).holders(np.arange(24), held)
    found = [Context(3, rank).positions(place, np.array(8)) for rank, place in zip(ranks, places, strict=True)]
    assert np.array(found).tolist() == list(range(24))
