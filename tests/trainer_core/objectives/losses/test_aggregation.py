import numpy as np
import pytest

from trainer_core.objectives.losses.aggregation import sequence_weights


def weights(aggregation):
    found = sequence_weights(np.array([2, 1, 3, 0]), np.array([0, 0, 1, 2], dtype=np.int32), aggregation)
    return found.tolist()


def test_sequence_weights_by_hand():
    assert weights("token") == [1, 1, 1, 1]
    # 6 tokens over 3 sequences that have any: each counts 2 in all
    assert weights("sequence")[:3] == pytest.approx([1, 2, 2 / 3])
    # 6 tokens over 2 groups that have any: each counts 3 in all, its tokens alike
    assert weights("group")[:3] == pytest.approx([1, 1, 1])


def test_groups_weigh_alike_whatever_their_size():
    found = sequence_weights(np.array([1, 1, 6]), np.array([5, 5, 2], dtype=np.int32), "group")
    assert found.tolist() == pytest.approx([2, 2, 4 / 6])


def test_a_constant_divisor_is_that_of_every_sequence():
    lengths = np.array([2, 1, 3])
    found = sequence_weights(lengths, np.zeros(3, dtype=np.int32), "constant", length=5)
    losses = np.array([0.3, -1.0, 4.0])  # sums over each sequence
    # Megatron divides by all 6 tokens: what is left is the mean over sequences of the sum divided by 5
    assert (found * losses).sum() / lengths.sum() == pytest.approx(losses.mean() / 5)
