import numpy as np
import pytest

from trainer_core.objectives.advantages.batch import batch_advantages, centred, returns_to_go


def test_a_return_is_the_reward_without_the_penalties_that_follow():
    found = returns_to_go(np.array([1.0, -2.0]), np.array([0.1, 0.2, 0.4, 1.0, 3.0]), np.array([3, 0, 2])[[0, 2]])
    np.testing.assert_allclose(found, [1 - 0.7, 1 - 0.6, 1 - 0.4, -2 - 4, -2 - 3])


def test_a_response_without_tokens_has_no_return():
    found = returns_to_go(np.array([1.0, 9.0, 2.0]), np.array([0.5, 0.25]), np.array([1, 0, 1]))
    np.testing.assert_allclose(found, [0.5, 1.75])


def test_without_penalties_every_token_has_the_reward():
    assert returns_to_go(np.array([1.0, 2.0]), None, np.array([2, 1])).tolist() == [1, 1, 2]


def test_returns_are_normalised_over_the_tokens_that_count():
    returns, counted = np.array([1.0, 2.0, np.nan, 6.0]), np.array([True, True, False, True])
    found = batch_advantages(returns, counted)
    # mean 3, variance (4 + 1 + 9) / 2 = 7
    np.testing.assert_allclose(found, np.array([-2, -1, 0, 3]) / np.sqrt(7), rtol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_equal_returns_give_no_advantage(count):
    assert batch_advantages(np.full(count, 0.1), np.ones(count, dtype=bool)).tolist() == [0] * count


def test_the_baseline_is_the_mean_of_the_group():
    rewards = np.array([1, 2, 3, 7, 0.1], dtype=np.float32)
    usable = np.array([True, True, False, True, True])
    assert centred(rewards, np.array([0, 0, 0, 4, 4], dtype=np.int32), usable).tolist() == pytest.approx(
        [-0.5, 0.5, 0, 3.45, -3.45]
    )
