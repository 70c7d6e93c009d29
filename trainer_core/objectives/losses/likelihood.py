"""Maximum likelihood."""

import torch

from trainer_core.model.token_loss import TokenLoss


def likelihood_loss(logprobs: torch.Tensor) -> TokenLoss:
    """Negative log-likelihood of each token, (R,). Supervised fine-tuning; of samples, rejection sampling."""
    return TokenLoss(-logprobs, torch.zeros_like(logprobs))
