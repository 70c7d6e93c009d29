"""Importance sampling between the policy that drew the samples and the trainer's."""

import torch

from trainer_core.model.segments import Segments
from trainer_core.objective_config import Correction, Level
from trainer_core.objectives.losses.log_ratio import log_ratio


def importance_weights(
    correction: Correction, trainer: torch.Tensor, behaviour: torch.Tensor, segments: Segments
) -> torch.Tensor:
    """Weight of each response token's loss, without gradient.

    The ratio is rho = exp(trainer - behaviour), of the token, of its response (the product over its tokens) or their
    geometric mean. "truncate" gives min(rho, limit), "mask" rho or 1 where low <= rho <= high, else 0.

    Sources: truncated importance sampling, Ionides (2008), between engine and trainer Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training" (2025); masks, IcePop (arXiv 2510.18855); the
    geometric mean as a mask of whole responses, Liu et al., "When speed kills stability" (2025).

    Args:
        correction: what to do with which ratio.
        trainer: (R,) log-probabilities by the trainer before its updates, in nats.
        behaviour: (R,) log-probabilities by the policy that drew the tokens.
        segments: the responses.
    """
    if correction.type == "none":
        return torch.ones_like(trainer)
    with torch.no_grad():
        ratio = torch.exp(_log_ratio(trainer, behaviour, segments, correction.level))
        if correction.type == "truncate":
            return ratio.clamp(max=correction.limit)
        inside = (ratio >= correction.low) & (ratio <= correction.high)
        return torch.where(inside, ratio if correction.weigh else 1.0, 0.0)


def _log_ratio(trainer: torch.Tensor, behaviour: torch.Tensor, segments: Segments, level: Level) -> torch.Tensor:
    """(R,), bounded like every log-ratio that enters a loss."""
    ratio = log_ratio(trainer, behaviour)
    if level == "token":
        return ratio
    whole = segments.sum(ratio) if level == "sequence" else segments.mean(ratio)
    return log_ratio(segments.spread(whole, len(ratio)), torch.zeros_like(ratio))
