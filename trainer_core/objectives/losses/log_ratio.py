"""Bounded log-ratios."""

import torch

LOG_RATIO_LIMIT = 20.0
"""Largest |log-ratio| that enters a loss, in nats: exp(20) is 5e8, while float32 overflows at 88."""


def log_ratio(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """upper - lower, clamped to +-LOG_RATIO_LIMIT, beyond which no gradient flows."""
    return (upper - lower).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
