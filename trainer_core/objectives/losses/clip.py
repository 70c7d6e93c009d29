"""PPO's clipped surrogate, with two limits and dual clip."""

import torch

from trainer_core.model.token_loss import TokenLoss


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual_limit: float | None = None
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and with a dual limit c at most -c A where A is negative; all (R,).

    Sources: PPO (arXiv 1707.06347) equation 7; two limits, "clip-higher", DAPO (arXiv 2503.14476) section 3.1;
    dual clip, Ye et al., "Mastering complex control in MOBA games" (arXiv 1912.09729).

    Args:
        ratio: exp(log-probability - old log-probability), which has the gradient.
        advantages: A.
        low: the ratio is clipped below at 1 - low.
        high: the ratio is clipped above at 1 + high.
        dual_limit: c.
    """
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1 - low, 1 + high)
    loss, clipped = torch.maximum(plain, limited), limited > plain
    if dual_limit is not None:
        most = -advantages * dual_limit
        beyond = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(beyond, most, loss), clipped | beyond
    return TokenLoss(loss, clipped.float())
