"""What an objective returns for each token."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each response token and what is reported about it, all (R,) float32."""

    loss: torch.Tensor
    """To be summed over each sequence with the sequence's weight, and minimised."""
    clipped: torch.Tensor
    """1 where the clipped branch of the surrogate was taken, so that no gradient flows."""
