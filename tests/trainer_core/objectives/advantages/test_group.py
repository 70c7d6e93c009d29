import math

import numpy as np
import pytest

from trainer_core.objectives.advantages.group import group_advantages


def advantages(rewards, groups, usable=None, normalize_by_std=True):
    usable = [True] * len(rewards) if usable is None else usable
    return group_advantages(
        np.array(rewards, dtype=np.float32), np.array(groups, dtype=np.int32), np.array(usable), normalize_by_std
    )


def test_advantages_by_hand():
    # group 0: mean 0.5, standard deviation (n - 1) sqrt(1/3); group 1: mean 2, standard deviation sqrt(2)
    found = advantages([0, 1, 0, 1, 1, 3], [0, 0, 0, 0, 1, 1])
    scale = 0.5 / math.sqrt(1 / 3)
    np.testing.assert_allclose(found, [-scale, scale, -scale, scale, -math.sqrt(0.5), math.sqrt(0.5)], rtol=1e-5)


def test_advantages_without_division():
    np.testing.assert_allclose(advantages([0, 1, 5], [7, 7, 7], normalize_by_std=False), [-2, -1, 3])


@pytest.mark.parametrize("reward", [0.0, 0.1, 1e6])
def test_equal_rewards_give_no_advantage(reward):
    assert advantages([reward] * 5 + [0, 1], [3] * 5 + [4, 4])[:5].tolist() == [0] * 5


def test_what_is_not_usable_does_not_count():
    with_it = advantages([0, 1, math.nan, 1], [0, 0, 0, 0], [True, True, False, True])
    without = advantages([0, 1, 1], [0, 0, 0])
    assert with_it[2] == 0
    assert np.delete(with_it, 2).tolist() == without.tolist()


def test_a_lone_usable_sample_has_no_advantage():
    assert advantages([1, 0], [0, 0], [True, False]).tolist() == [0, 0]
