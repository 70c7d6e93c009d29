"""Losses by hand, with their gradients, and importance weights against one of token by token."""

import math

import numpy as np
import pytest
import torch

from trainer_core.objectives.loss_config import MaskedCorrection, TruncatedCorrection
from trainer_core.objectives.losses import (
    clipped_surrogate,
    clipped_weight_loss,
    importance_weights,
    kl_estimate,
    policy_loss,
    preference_loss,
    sequence_surrogate,
    value_loss,
)
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.registry import loss_of
from trainer_core.objectives.tokens import Segments, Tokens

LENGTHS = [3, 1, 2]
ADVANTAGES = [1.0, -2.0, 0.5]
LOG_RATIOS = [0.3, -0.1, 0.1, 0.4, 0.9, -0.1]
CHANGES = [0.9, -1.2, 0.3, -0.5, 0.8, 0.6]  # log-probability by the trainer - by the behaviour
BEHAVIOUR = [-1.0, -0.2, -3.0, -2.0, -0.1, -0.7]
SEGMENTS = Segments(torch.tensor(LENGTHS))


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def spread(values):
    return double([v for v, n in zip(values, LENGTHS, strict=True) for _ in range(n)])


def tokens(logprobs, lengths=None, **values):
    segments = Segments(torch.tensor([len(logprobs)] if lengths is None else lengths))
    return Tokens(logprobs, segments, values)


def surrogate(policy, ratio, advantage, entropy=None, reference=None):
    logprobs = double([math.log(ratio)]).requires_grad_()
    values = {"old_logprobs": double([0.0]), "advantages": double([advantage])}
    values |= {} if entropy is None else {"entropy": double([entropy])}
    values |= {} if reference is None else {"reference_logprobs": double([reference])}
    result = policy_loss(policy, loss_of(policy), tokens(logprobs, **values))
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


def test_a_value_within_the_clip_is_not_counted_as_clipped_by_rounding():
    drawn = torch.rand((3, 10_000), generator=torch.Generator().manual_seed(3)) - 0.5
    old, values, error = 0.05 * drawn[0], 0.04 * drawn[1], drawn[2]
    for returns in (values + 0.1 * error, error):
        found = value_loss(values, old, returns, 0.05)
        assert found.clipped.sum() == 0
        assert torch.equal(found.loss, value_loss(values, old, returns, None).loss)
    beyond = value_loss(old + 0.06, old, old, 0.05)  # the clipped value is nearer to its return: no loss is added
    assert beyond.clipped.sum() == 0
    assert value_loss(old + 0.06, old, old + 1, 0.05).clipped.sum() == len(old)


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
    zero = torch.zeros(1)
    given = tokens(logprobs, old_logprobs=zero, advantages=zero - 1, reference_logprobs=zero)
    loss = policy_loss(policy, loss_of(policy), given).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert math.isfinite(loss.item())
    assert gradient.item() == 0


def test_without_old_log_probabilities_the_ratio_is_one():
    logprobs = torch.tensor([-3.0, -0.1], requires_grad=True)
    policy = PolicyConfig()
    result = policy_loss(policy, loss_of(policy), tokens(logprobs, advantages=torch.tensor([2.0, -1.0])))
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss.tolist() == gradient.tolist() == [-2, 1]
    assert result.clipped.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "limited", "unlimited"),
    [
        (5.0, -2.0, (6.0, 0.0, 1), (10.0, 2.0, 0)),  # far above and bad: at most -A c = 6
        (2.0, -2.0, (4.0, 2.0, 0), (4.0, 2.0, 0)),
        (0.5, -2.0, (1.6, 0.0, 1), (1.6, 0.0, 1)),
        (5.0, 2.0, (-2.4, 0.0, 1), (-2.4, 0.0, 1)),  # good: the ordinary limit counts
    ],
)
def test_dual_clip_by_hand(ratio, advantage, limited, unlimited):
    for dual_limit, expected in ((3.0, limited), (None, unlimited)):
        logprobs = double([math.log(ratio)]).requires_grad_()
        given = tokens(logprobs, old_logprobs=double([0.0]), advantages=double([advantage]))
        result = clipped_surrogate(given, 0.2, 0.2, dual_limit)
        (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
        slope = gradient.item() / ratio  # by the ratio
        assert (result.loss.item(), slope, result.clipped.item()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "weight", "clipped"), [(0.3, 0.5, 1), (0.5, 0.5, 0), (1.7, 1.7, 0), (3.0, 3.0, 0), (9.0, 3.0, 1)]
)
@pytest.mark.parametrize("advantage", [2.0, -1.0])
def test_every_token_keeps_a_gradient(ratio, weight, clipped, advantage):
    logprobs = double([-0.7]).requires_grad_()
    old = logprobs.detach() - math.log(ratio)
    limits = (0.5 + 1e-12, 2.0 + 1e-12)  # exp(log(3)) may be above 3 in the last bit
    result = clipped_weight_loss(tokens(logprobs, old_logprobs=old, advantages=double([advantage])), *limits)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss.item() == pytest.approx(0.7 * weight * advantage)
    assert gradient.item() == pytest.approx(-weight * advantage)  # the ratio itself is a constant
    assert result.clipped.item() == clipped


def of_sequences(log_ratios, advantages):
    given = tokens(log_ratios, LENGTHS, old_logprobs=torch.zeros_like(log_ratios), advantages=advantages)
    return sequence_surrogate(given, 0.2, 0.2)


def test_a_sequence_has_the_clipped_loss_of_its_mean_ratio():
    result = of_sequences(double(LOG_RATIOS), spread(ADVANTAGES))
    # s = e^0.1, e^0.4, e^0.4; -A s is clipped for the last alone: the second has a negative advantage
    losses = [-math.exp(0.1), 2 * math.exp(0.4), -0.5 * 1.2]
    assert result.loss.tolist() == pytest.approx(spread(losses).tolist())
    assert result.clipped.tolist() == [0, 0, 0, 0, 1, 1]


def test_its_gradient_is_that_of_the_sequence():
    log_ratios = double(LOG_RATIOS).requires_grad_()
    loss = of_sequences(log_ratios, spread(ADVANTAGES)).loss
    losses = torch.segment_reduce(loss, "mean", lengths=torch.tensor(LENGTHS))
    (gradient,) = torch.autograd.grad(losses.sum(), log_ratios)
    # d (-A s) / d log-ratio of one of n tokens = -A s / n
    slopes = [-math.exp(0.1) / 3, 2 * math.exp(0.4), 0.0]
    assert gradient.tolist() == pytest.approx(spread(slopes).tolist())


def test_tokens_may_have_advantages_of_their_own():
    log_ratios = double(LOG_RATIOS).requires_grad_()
    advantages = double([3.0, 1.0, -1.0, -2.0, 0.5, -0.5])
    result = of_sequences(log_ratios, advantages)
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_ratios)
    # s = e^0.1 for three tokens, e^0.4 for the others; the good one of these is clipped
    ratios = [math.exp(0.1)] * 3 + [math.exp(0.4), 0.0, math.exp(0.4)]
    assert gradient.tolist() == pytest.approx([-a * s for a, s in zip(advantages.tolist(), ratios, strict=True)])


def test_a_preference_has_the_value_and_the_derivatives():
    logprobs = torch.tensor([-1.0, -5.0], requires_grad=True)
    given = tokens(logprobs, coefficients=torch.tensor([0.3, -0.2]), losses=torch.tensor([0.1, 0.4]))
    result = preference_loss(given)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss.tolist() == pytest.approx([0.1, 0.4])
    assert gradient.tolist() == pytest.approx([-0.3, 0.2])


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.2), ("k2", 0.02), ("k3", math.exp(0.2) - 1 - 0.2)])
def test_kl_estimators_by_hand(estimator, expected):
    assert kl_estimate(double([0.2]), estimator).item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_estimators_have_the_exact_mean(estimator):
    p, q = double([0.1, 0.3, 0.6]), double([0.3, 0.3, 0.4])
    mean = (q * kl_estimate(p.log() - q.log(), estimator)).sum()
    assert mean.item() == pytest.approx((q * (q.log() - p.log())).sum().item())


def weights(correction, changes=CHANGES):
    behaviour = double(BEHAVIOUR)
    trainer = (behaviour + double(changes)).requires_grad_()
    found = importance_weights(correction, trainer, behaviour, SEGMENTS)
    assert not found.requires_grad
    return found.tolist()


def ratios(level):
    found = []
    for part in np.split(np.array(CHANGES), np.cumsum(LENGTHS)[:-1]):
        whole = {
            "token": part,
            "sequence": np.full_like(part, part.sum()),
            "sequence_mean": np.full_like(part, part.mean()),
        }
        found += np.exp(whole[level]).tolist()
    return found


def test_a_correction_weighs_the_loss_but_not_the_kl():
    logprobs = double([-1.0]).requires_grad_()
    values = {"advantages": double([-2.0]), "reference_logprobs": double([-1.5])}
    given = tokens(logprobs, behaviour_logprobs=double([-1.0 - math.log(3)]), **values)
    policy = PolicyConfig(kl_coefficient=0.5, kl_estimator="k2", correction=TruncatedCorrection(limit=1.25))
    assert policy_loss(policy, loss_of(policy), given).loss.item() == pytest.approx(2.0 * 1.25 + 0.5 * 0.125)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_truncated_weights(level):
    expected = [min(ratio, 1.5) for ratio in ratios(level)]
    assert 1.5 in expected
    assert weights(TruncatedCorrection(level=level, limit=1.5)) == pytest.approx(expected)


@pytest.mark.parametrize("weigh", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_masked_weights(level, weigh):
    low, high = (0.7, 1.9)
    expected = [(ratio if weigh else 1.0) if low <= ratio <= high else 0.0 for ratio in ratios(level)]
    assert 0 < expected.count(0.0) < 6
    assert weights(MaskedCorrection(level=level, low=low, high=high, weigh=weigh)) == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_ratios_beyond_measure_are_bounded(level):
    found = weights(TruncatedCorrection(level=level, limit=1e30), [1000.0] * 6)
    assert found == pytest.approx([math.exp(20)] * 6)
    assert weights(MaskedCorrection(level=level), [-math.inf] * 6) == [0] * 6
