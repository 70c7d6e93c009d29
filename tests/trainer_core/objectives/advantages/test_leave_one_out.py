import math

import numpy as np
import pytest

from trainer_core.objectives.advantages.leave_one_out import leave_one_out_advantages


def advantages(rewards, groups, usable=None):
    usable = [True] * len(rewards) if usable is None else usable
    return leave_one_out_advantages(
        np.array(rewards, dtype=np.float32), np.array(groups, dtype=np.int32), np.array(usable)
    ).tolist()


def test_each_sample_is_compared_with_the_others():
    assert advantages([0, 1, 5, 2, 4], [7, 7, 7, 3, 3]) == [-3, -1.5, 4.5, -2, 2]


def test_what_is_not_usable_is_no_baseline():
    assert advantages([0, 1, math.nan, 5], [0, 0, 0, 0], [True, True, False, True]) == [-3, -1.5, 0, 4.5]


@pytest.mark.parametrize("usable", [[True, False], [False, False]])
def test_a_lone_sample_has_no_advantage(usable):
    assert advantages([1, 0], [0, 0], usable) == [0, 0]


def test_equal_rewards_give_exactly_none():
    assert advantages([0.1] * 7, [0] * 7) == [0] * 7
