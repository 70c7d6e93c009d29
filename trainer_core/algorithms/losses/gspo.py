"""The clipped surrogate of whole sequences."""

import torch

from trainer_core.algorithms.losses.clip import clipped_surrogate
from trainer_core.model.segments import Segments
from trainer_core.model.token_loss import TokenLoss


def sequence_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, segments: Segments, low: float, high: float
) -> TokenLoss:
    """The clipped surrogate with one ratio for each sequence, s = exp(mean of the tokens' log-ratios).

    Every token has the loss of its sequence, so that the mean over a sequence's tokens is
    max(-A s, -A clip(s, 1 - low, 1 + high)).

    Source: GSPO (arXiv 2507.18071) equations 5 and 7.

    Args:
        log_ratio: (R,) log-probability - old log-probability.
        advantages: (R,) A, the same for all tokens of a sequence.
        segments: the sequences.
        low: the ratio is clipped below at 1 - low.
        high: the ratio is clipped above at 1 + high.
    """
    ratio = torch.exp(segments.spread(segments.mean(log_ratio), len(log_ratio)))  # (R,) -> (S,) -> (R,)
    return clipped_surrogate(ratio, advantages, low, high)
