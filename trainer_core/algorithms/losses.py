"""The objectives, as pure functions of tensors; the advantages, of numpy arrays, are in a module without torch.

Sources: the clipped surrogate, PPO (arXiv 1707.06347) equation 7;
the KL estimators, J. Schulman, "Approximating KL divergence" (2020); asymmetric clipping, DAPO (arXiv 2503.14476).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_core.algorithms.advantages import group_advantages as group_advantages
from trainer_core.config import KlEstimator, PolicyConfig
from trainer_core.model.token_loss import TokenLoss


def kl_estimate(log_ratio: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimate KL(q || p) at samples of q from log_ratio = log p(x) - log q(x), elementwise, in nats.

    k1 = -log r (unbiased, may be negative), k2 = (log r)^2 / 2 (biased), k3 = r - 1 - log r (unbiased, not negative).
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio


def policy_loss(
    policy: PolicyConfig,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    reference_logprobs: torch.Tensor | None,
) -> TokenLoss:
    """Clipped surrogate, plus KL to the reference, minus the entropy bonus, per position; all (B, S) float32.

    The surrogate is max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - old_logprobs).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high)
    loss = torch.maximum(plain, limited)
    if reference_logprobs is not None and policy.kl_coefficient:
        loss = loss + policy.kl_coefficient * kl_estimate(reference_logprobs - logprobs, policy.kl_estimator)
    if policy.entropy_coefficient:
        loss = loss - policy.entropy_coefficient * entropy
    return TokenLoss(loss, (limited > plain).float())


def token_weights(response_mask: NDArray[np.bool_], aggregation: str) -> NDArray[np.float32]:
    """Weight of each position in the loss of a mini-batch: (N, S) mask -> (N, S), summing to the number of tokens.

    "token" weighs all tokens equally; "sequence" gives every non-empty sequence the same sum. Megatron divides the
    weighted sum by the number of tokens of all micro-batches and data-parallel ranks.
    """
    weights = response_mask.astype(np.float32)
    if aggregation == "sequence":
        lengths = response_mask.sum(axis=1, keepdims=True)  # (N, 1)
        filled = max(1, int((lengths > 0).sum()))
        weights *= response_mask.sum() / (filled * np.maximum(lengths, 1))
    return weights
