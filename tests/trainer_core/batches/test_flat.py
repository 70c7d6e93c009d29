import numpy as np

from trainer_core.batches.flat import flatten
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
