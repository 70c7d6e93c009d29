import math

import numpy as np
import pytest
import torch

from trainer_core.algorithms.advantages.group import group_advantages
from trainer_core.algorithms.losses.aggregation import sequence_weights
from trainer_core.algorithms.losses.composed import policy_loss
from trainer_core.algorithms.losses.kl import kl_estimate
from trainer_core.config import PolicyConfig
from trainer_core.model.segments import Segments

ONE = Segments(torch.tensor([1]))


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


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.2), ("k2", 0.02), ("k3", math.exp(0.2) - 1 - 0.2)])
def test_kl_estimators_by_hand(estimator, expected):
    assert kl_estimate(torch.tensor([0.2], dtype=torch.float64), estimator).item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_estimators_have_the_exact_mean(estimator):
    p, q = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    mean = (q * kl_estimate(p.log() - q.log(), estimator)).sum()
    assert mean.item() == pytest.approx((q * (q.log() - p.log())).sum().item())


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def surrogate(policy, ratio, advantage, entropy=0.0, reference=None):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    values = {"old_logprobs": torch.zeros(1, dtype=torch.float64), "advantages": double([advantage])}
    if reference is not None:
        values["reference_logprobs"] = double([reference])
    result = policy_loss(policy, logprobs, double([entropy]), values, ONE)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return result.loss.item(), gradient.item(), result.clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.1, 1.0, -1.1, -1.1, 0),
        (1.5, 1.0, -1.3, 0.0, 1),  # above 1 + clip_high and good: clipped
        (1.5, -1.0, 1.5, 1.5, 0),  # above and bad: pushed back
        (0.5, -1.0, 0.9, 0.0, 1),  # below 1 - clip_low and bad: clipped
        (0.5, 1.0, -0.5, -0.5, 0),  # below and good: pushed back
    ],
)
def test_the_clipped_surrogate_by_hand(ratio, advantage, loss, gradient, clipped):
    found = surrogate(PolicyConfig(clip_low=0.1, clip_high=0.3), ratio, advantage)
    assert found == pytest.approx((loss, gradient, clipped))


def test_the_kl_term_pulls_towards_the_reference():
    # k3 of log_ratio = reference - logprobs: its derivative by logprobs is 1 - exp(log_ratio)
    loss, gradient, _ = surrogate(PolicyConfig(kl_coefficient=0.5), 1.0, 0.0, reference=0.2)
    assert loss == pytest.approx(0.5 * (math.exp(0.2) - 1.2))
    assert gradient == pytest.approx(0.5 * (1 - math.exp(0.2)))


def test_a_reference_without_coefficient_does_not_change_the_loss():
    assert surrogate(PolicyConfig(), 1.1, 1.0, reference=3.0) == surrogate(PolicyConfig(), 1.1, 1.0)


def test_the_entropy_bonus_lowers_the_loss():
    plain, bonus = surrogate(PolicyConfig(), 1.0, 1.0), surrogate(PolicyConfig(entropy_coefficient=0.1), 1.0, 1.0, 2.0)
    assert bonus[0] == pytest.approx(plain[0] - 0.2)


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


@pytest.mark.parametrize("ratio", [-math.inf, -99.0, 99.0, math.inf])
def test_a_log_ratio_is_clamped(ratio):
    logprobs = torch.tensor([ratio], requires_grad=True)
    policy = PolicyConfig(kl_coefficient=1.0)
    one = torch.ones(1)
    values = {"old_logprobs": torch.zeros(1), "advantages": -one, "reference_logprobs": torch.zeros(1)}
    loss = policy_loss(policy, logprobs, one, values, ONE).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert math.isfinite(loss.item())
    assert gradient.item() == 0


def test_without_old_log_probabilities_the_ratio_is_one():
    logprobs = torch.tensor([-3.0, -0.1], requires_grad=True)
    advantages = torch.tensor([2.0, -1.0])
    result = policy_loss(
        PolicyConfig(), logprobs, torch.zeros(2), {"advantages": advantages}, Segments(torch.tensor([2]))
    )
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss.tolist() == gradient.tolist() == [-2, 1]
    assert result.clipped.tolist() == [0, 0]
