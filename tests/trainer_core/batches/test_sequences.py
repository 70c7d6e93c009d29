import numpy as np
import pytest

from trainer_core.batches.sequences import SupervisedExamples, as_sequences, per_position, share_rows

EXAMPLES = SupervisedExamples.of([([1, 2, 3], [4, 5]), ([6], [7, 8, 9])])


def test_a_row_predicts_the_next_token():
    padded = EXAMPLES.padded()
    assert padded.tokens.tolist() == [[1, 2, 3, 4], [6, 7, 8, 0]]
    assert padded.targets.tolist() == [[2, 3, 4, 5], [7, 8, 9, 0]]


def test_only_positions_that_predict_the_response_count():
    padded = EXAMPLES.padded()
    assert padded.targets[padded.mask].tolist() == [4, 5, 7, 8, 9]
    assert padded.widths.tolist() == [4, 3]


def test_values_of_response_tokens_stand_where_they_are_predicted():
    padded = EXAMPLES.padded()
    matrix = EXAMPLES.spread(np.arange(5, dtype=np.float32), padded.tokens.shape[1])
    assert matrix[0].tolist() == [0, 0, 0, 1]
    assert matrix[padded.mask].tolist() == [0, 1, 2, 3, 4]


def test_of_a_whole_sequence_all_but_the_first_token_count():
    padded = as_sequences([np.array([3, 1, 4], dtype=np.int32), np.array([1, 5], dtype=np.int32)]).padded()
    assert padded.targets[padded.mask].tolist() == [1, 4, 5]


def test_a_width_covers_the_longest_of_the_rows():
    padded = as_sequences([np.arange(length, dtype=np.int32) for length in (3, 30)]).padded()
    assert padded.tokens.shape == (2, 29)
    assert padded.width_of(np.array([0])) == 2
    assert padded.width_of(np.array([0, 1])) == 29


def test_one_value_per_sequence_is_spread_over_its_row():
    padded = EXAMPLES.padded()
    assert per_position(np.array([0.5, 2.0], dtype=np.float32), padded)[:, 3].tolist() == [0.5, 2.0]


@pytest.mark.parametrize(("rows", "replicas", "size"), [(16, 1, 4), (5, 2, 2), (1, 2, 8), (7, 3, 100)])
def test_shares_hold_each_row_once_and_are_alike(rows, replicas, size):
    shares = share_rows(np.arange(rows), replicas, size)
    flat = np.concatenate([batch for replica in shares for batch in replica])
    assert sorted(flat[flat >= 0].tolist()) == list(range(rows))
    assert len({len(replica) for replica in shares}) == 1
    sizes = {len(batch) for replica in shares for batch in replica}
    assert len(sizes) == 1
    assert sizes.pop() <= size
