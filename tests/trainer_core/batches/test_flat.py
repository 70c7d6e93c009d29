import numpy as np

from trainer_core.batches.flat import alike, flatten
from trainer_core.batches.sequences import SupervisedExamples

EXAMPLES = SupervisedExamples.of([([1, 2, 3], [4, 5]), ([6], [7, 8, 9]), ([10, 11], [12])])


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
