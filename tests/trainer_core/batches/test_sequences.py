import numpy as np

from tests.trainer_core.models import examples_of
from trainer_core.batches.sequences import as_sequences

EXAMPLES = examples_of([([1, 2, 3], [4, 5]), ([6], [7, 8, 9])])


def test_pairs_become_flat_arrays():
    assert EXAMPLES.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert EXAMPLES.lengths.tolist() == [5, 4]
    assert EXAMPLES.positions.tolist() == [4, 3]


def test_of_a_whole_sequence_all_but_the_first_token_count():
    whole = as_sequences([np.array([3, 1, 4], dtype=np.int32), np.array([1], dtype=np.int32)])
    assert whole.prompt_lengths.tolist() == [1, 1]
    assert whole.response_lengths.tolist() == [2, 0]


def test_one_value_per_sequence_is_repeated_over_its_response():
    assert EXAMPLES.per_response_token(np.array([0.5, 2.0])).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
