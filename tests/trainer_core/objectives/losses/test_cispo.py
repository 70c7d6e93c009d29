import pytest
import torch

from trainer_core.objectives.losses.cispo import clipped_weight_loss


@pytest.mark.parametrize(
    ("ratio", "weight", "clipped"), [(0.3, 0.5, 1), (0.5, 0.5, 0), (1.7, 1.7, 0), (3.0, 3.0, 0), (9.0, 3.0, 1)]
)
@pytest.mark.parametrize("advantage", [2.0, -1.0])
def test_every_token_keeps_a_gradient(ratio, weight, clipped, advantage):
    logprobs = torch.tensor([-0.7], dtype=torch.float64, requires_grad=True)
    ratios = torch.exp(logprobs - logprobs.detach()) * ratio
    result = clipped_weight_loss(ratios, logprobs, torch.tensor([advantage], dtype=torch.float64), 0.5, 2.0)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss.item() == pytest.approx(0.7 * weight * advantage)
    assert gradient.item() == pytest.approx(-weight * advantage)  # the ratio itself is a constant
    assert result.clipped.item() == clipped
