import pytest
import torch

from trainer_core.objectives.losses.clip import clipped_surrogate


def surrogate(ratio, advantage, dual_limit):
    ratio = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    result = clipped_surrogate(ratio, torch.tensor([advantage], dtype=torch.float64), 0.2, 0.2, dual_limit)
    (gradient,) = torch.autograd.grad(result.loss.sum(), ratio)
    return result.loss.item(), gradient.item(), result.clipped.item()


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
    assert surrogate(ratio, advantage, 3.0) == pytest.approx(limited)
    assert surrogate(ratio, advantage, None) == pytest.approx(unlimited)
