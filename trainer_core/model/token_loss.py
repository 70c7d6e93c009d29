"""What an objective returns for each position."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each position and what is reported about it, all (B, S) float32; arbitrary at masked positions."""

    loss: torch.Tensor
    """To be averaged with the positions' weights and minimised."""
    clipped: torch.Tensor
    """1 where the clipped branch of the surrogate was taken, so that no gradient flows."""
