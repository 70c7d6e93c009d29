import math

import pytest
import torch

from trainer_core.objectives.losses.kl import kl_estimate


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.2), ("k2", 0.02), ("k3", math.exp(0.2) - 1 - 0.2)])
def test_kl_estimators_by_hand(estimator, expected):
    assert kl_estimate(torch.tensor([0.2], dtype=torch.float64), estimator).item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_estimators_have_the_exact_mean(estimator):
    p, q = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    mean = (q * kl_estimate(p.log() - q.log(), estimator)).sum()
    assert mean.item() == pytest.approx((q * (q.log() - p.log())).sum().item())
