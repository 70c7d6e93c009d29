"""The ratio of whole sequences, against one of sequence by sequence."""

import math

import pytest
import torch

from trainer_core.model.segments import Segments
from trainer_core.objectives.losses.gspo import sequence_surrogate

LENGTHS = [3, 1, 2]
ADVANTAGES = [1.0, -2.0, 0.5]
LOG_RATIOS = [0.3, -0.1, 0.1, 0.4, 0.9, -0.1]


def spread(values):
    return torch.tensor([v for v, n in zip(values, LENGTHS, strict=True) for _ in range(n)], dtype=torch.float64)


def found(log_ratios, low=0.2, high=0.2):
    return sequence_surrogate(log_ratios, spread(ADVANTAGES), Segments(torch.tensor(LENGTHS)), low, high)


def test_a_sequence_has_the_clipped_loss_of_its_mean_ratio():
    result = found(torch.tensor(LOG_RATIOS, dtype=torch.float64))
    # s = e^0.1, e^0.4, e^0.4; -A s is clipped for the last alone: the second has a negative advantage
    losses = [-math.exp(0.1), 2 * math.exp(0.4), -0.5 * 1.2]
    assert result.loss.tolist() == pytest.approx(spread(losses).tolist())
    assert result.clipped.tolist() == [0, 0, 0, 0, 1, 1]


def test_its_gradient_is_that_of_the_sequence():
    log_ratios = torch.tensor(LOG_RATIOS, dtype=torch.float64, requires_grad=True)
    losses = torch.segment_reduce(found(log_ratios).loss, "mean", lengths=torch.tensor(LENGTHS))
    (gradient,) = torch.autograd.grad(losses.sum(), log_ratios)
    # d (-A s) / d log-ratio of one of n tokens = -A s / n
    slopes = [-math.exp(0.1) / 3, 2 * math.exp(0.4), 0.0]
    assert gradient.tolist() == pytest.approx(spread(slopes).tolist())


def test_tokens_may_have_advantages_of_their_own():
    log_ratios = torch.tensor([0.3, -0.1, 0.1, 0.4, 0.9, -0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([3.0, 1.0, -1.0, -2.0, 0.5, -0.5], dtype=torch.float64)
    result = sequence_surrogate(log_ratios, advantages, Segments(torch.tensor(LENGTHS)), 0.2, 0.2)
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_ratios)
    # s = e^0.1 for three tokens, e^0.4 for the others, of which the good one is clipped
    ratios = [math.exp(0.1)] * 3 + [math.exp(0.4), 0.0, math.exp(0.4)]
    assert gradient.tolist() == pytest.approx([-a * s for a, s in zip(advantages.tolist(), ratios, strict=True)])
