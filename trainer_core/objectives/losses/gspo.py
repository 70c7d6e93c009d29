"""The clipped surrogate of whole sequences."""

import torch

from trainer_core.model.segments import Segments
from trainer_core.model.token_loss import TokenLoss
from trainer_core.objectives.losses.clip import clipped_surrogate


def sequence_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, segments: Segments, low: float, high: float
) -> TokenLoss:
    """The clipped surrogate with one ratio for each sequence, s = exp(mean of the tokens' log-ratios).

    The loss of token t is max(-A_t s, -A_t clip(s, 1 - low, 1 + high)), its derivative by the token's own log-ratio
    -A_t s where nothing is clipped. Advantages may differ from token to token; where they do not, the mean over a
    sequence's tokens has the value and the gradient of the sequence's loss.

    Source: GSPO (arXiv 2507.18071) equations 5 and 7, GSPO-token, section 4.3.

    Args:
        log_ratio: (R,) log-probability - old log-probability.
        advantages: (R,) A.
        segments: the sequences.
        low: the ratio is clipped below at 1 - low.
        high: the ratio is clipped above at 1 + high.
    """
    whole = segments.spread(segments.mean(log_ratio.detach()), len(log_ratio))  # (R,) -> (S,) -> (R,)
    return clipped_surrogate(torch.exp(whole + (log_ratio - log_ratio.detach())), advantages, low, high)
