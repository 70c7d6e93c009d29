"""REINFORCE with clipped importance weights."""

import torch

from trainer_core.model.token_loss import TokenLoss


def clipped_weight_loss(
    ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> TokenLoss:
    """-clip(r, 1 - low, 1 + high) A log-probability, in which the clipped ratio has no gradient; all (R,).

    Every token keeps its gradient; `clipped` says where the weight is not the ratio.

    Source: CISPO, MiniMax-M1 (arXiv 2506.13585) equations 4 and 5.
    """
    weight = ratio.detach().clamp(1 - low, 1 + high)
    return TokenLoss(-weight * advantages * logprobs, (weight != ratio.detach()).float())
