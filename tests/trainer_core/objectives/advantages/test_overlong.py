import numpy as np
import pytest

from trainer_core.objective_config import NoOverlong, OverlongLeftOut, OverlongPenalty
from trainer_core.objectives.advantages.overlong import shaped_rewards


def test_the_penalty_by_hand():
    """DAPO's equation 13 with L_max = 10 and L_cache = 4."""
    lengths = np.array([1, 6, 7, 9, 10, 11])
    found = shaped_rewards(OverlongPenalty(length=10, buffer=4), np.ones(6, dtype=np.float32), lengths)
    assert found.dtype == np.float32
    assert found.tolist() == [1, 1, 0.75, 0.25, 0, 0]


def test_the_penalty_has_a_factor():
    found = shaped_rewards(OverlongPenalty(length=4, buffer=2, factor=0.5), np.zeros(2, np.float32), np.array([3, 4]))
    assert found.tolist() == [-0.25, -0.5]


@pytest.mark.parametrize("overlong", [NoOverlong(), OverlongLeftOut(length=1)])
def test_otherwise_rewards_are_as_they_were(overlong):
    assert shaped_rewards(overlong, np.array([0.5], np.float32), np.array([9])).tolist() == [0.5]
