"""The objectives, as pure functions of tensors; the advantages, of numpy arrays, are in a module without torch.

Sources: the clipped surrogate, PPO (arXiv 1707.06347) equation 7;
the KL estimators, J. Schulman, "Approximating KL divergence" (2020); asymmetric clipping, DAPO (arXiv 2503.14476).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_core.config import Aggregation, KlEstimator, PolicyConfig
from trainer_core.model.token_loss import TokenLoss

LOG_RATIO_LIMIT = 20.0
"""Largest |log-ratio| that enters a loss, in nats: exp(20) is 5e8, while float32 overflows at 88."""


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
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    reference_logprobs: torch.Tensor | None,
) -> TokenLoss:
    """Clipped surrogate, plus KL to the reference, minus the entropy bonus, per response token; all (R,) float32.

    The surrogate is max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - old_logprobs). Without
    old log-probabilities they are the current ones, as before the first update: r is 1, and its gradient that of
    logprobs. Both log-ratios are clamped to +-LOG_RATIO_LIMIT, beyond which no gradient flows.
    """
    ratio = torch.exp(_log_ratio(logprobs, logprobs.detach() if old_logprobs is None else old_logprobs))
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high)
    loss = torch.maximum(plain, limited)
    if reference_logprobs is not None and policy.kl_coefficient:
        log_ratio = _log_ratio(reference_logprobs, logprobs)
        loss = loss + policy.kl_coefficient * kl_estimate(log_ratio, policy.kl_estimator)
    if policy.entropy_coefficient:
        loss = loss - policy.entropy_coefficient * entropy
    return TokenLoss(loss, (limited > plain).float())


def _log_ratio(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    return (upper - lower).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_weights(
    response_lengths: NDArray[np.int64], groups: NDArray[np.int32], aggregation: Aggregation
) -> NDArray[np.float32]:
    """Weight of each sequence's summed loss in the loss of a mini-batch: (n,) tokens, (n,) group numbers -> (n,).

    "token" weighs all tokens equally, "sequence" gives every sequence the same weight in all, "group" every prompt
    group, and within it every token. Weights times lengths sum to the number of tokens, by which Megatron divides the
    sum over all micro-batches and data-parallel ranks.
    """
    if aggregation == "token":
        return np.ones(len(response_lengths), dtype=np.float32)
    members = np.arange(len(response_lengths)) if aggregation == "sequence" else groups
    _, unit = np.unique(members, return_inverse=True)  # what gets an equal share
    tokens = np.bincount(unit, response_lengths)  # of each unit
    shares = response_lengths.sum() / (np.count_nonzero(tokens) * np.maximum(tokens, 1))
    return shares[unit].astype(np.float32)
