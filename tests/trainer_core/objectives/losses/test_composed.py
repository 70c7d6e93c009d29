import math

import pytest
import torch

from trainer_core.config import PolicyConfig
from trainer_core.model.segments import Segments
from trainer_core.objectives.losses.composed import policy_loss

ONE = Segments(torch.tensor([1]))


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
    found = surrogate(PolicyConfig(clip_low=0.1, clip_high=0.3, epochs=2), ratio, advantage)
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
