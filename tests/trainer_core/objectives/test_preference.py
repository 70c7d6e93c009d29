"""DPO in losses of single sequences, against DPO in pairs by autograd."""

import math

import numpy as np
import pytest
import torch

from trainer_core.objectives.loss_config import PreferenceLoss
from trainer_core.objectives.preference import preferences, preferred_pairs

REWARDS = np.array([1, 0, 2, 2, 5, 5, 3, 7, 9], dtype=np.float32)
GROUPS = np.array([3, 3, 3, 3, 0, 0, 6, 6, 6], dtype=np.int32)
USABLE = np.array([True] * 8 + [False])


def pairs(kind):
    return preferred_pairs(PreferenceLoss(pairs=kind), REWARDS, GROUPS, USABLE).tolist()


def test_the_best_of_a_group_is_paired_with_the_worst():
    assert sorted(pairs("best_worst")) == [[2, 1], [7, 6]]


def test_all_pairs_have_different_rewards():
    assert sorted(pairs("all")) == [[0, 1], [2, 0], [2, 1], [3, 0], [3, 1], [7, 6]]


def test_there_may_be_no_pair():
    assert preferred_pairs(PreferenceLoss(), REWARDS[4:6], GROUPS[4:6], USABLE[4:6]).shape == (0, 2)


def test_one_pair_by_hand():
    coefficients, losses = preferences(PreferenceLoss(beta=0.5), np.array([0.2, -0.4]), np.array([[1, 0]]))
    margin = 0.5 * (-0.4 - 0.2)
    assert losses.sum() == pytest.approx(-math.log(1 / (1 + math.exp(-margin))))
    slope = 0.5 / (1 + math.exp(margin))  # beta sigmoid(-margin)
    assert coefficients.tolist() == pytest.approx([-slope, slope])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["best_worst", "all"])
def test_value_and_gradient_are_those_of_pairs(smoothing, kind):
    loss = PreferenceLoss(beta=0.7, label_smoothing=smoothing, pairs=kind)
    chosen = preferred_pairs(loss, REWARDS, GROUPS, USABLE)
    ratios = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    margins = 0.7 * (ratios[chosen[:, 0]] - ratios[chosen[:, 1]])
    direct = -(1 - smoothing) * torch.nn.functional.logsigmoid(margins)
    direct = (direct - smoothing * torch.nn.functional.logsigmoid(-margins)).mean()
    (expected,) = torch.autograd.grad(direct, ratios)
    coefficients, losses = preferences(loss, ratios.detach().numpy(), chosen)
    assert losses.sum() == pytest.approx(direct.item(), rel=1e-6)
    np.testing.assert_allclose(-coefficients, expected.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("margin", [-1e4, 1e4])
def test_hopeless_pairs_stay_finite(margin):
    coefficients, losses = preferences(PreferenceLoss(beta=1.0), np.array([margin, 0.0]), np.array([[0, 1]]))
    assert np.isfinite(losses).all()
    assert coefficients.tolist() == ([0, 0] if margin > 0 else [1, -1])
