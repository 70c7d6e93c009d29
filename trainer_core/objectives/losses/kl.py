"""Estimators of a KL divergence."""

import torch

from trainer_core.objective_config import KlEstimator


def kl_estimate(log_ratio: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimate KL(q || p) at samples of q from log_ratio = log p(x) - log q(x), elementwise, in nats.

    k1 = -log r (unbiased, may be negative), k2 = (log r)^2 / 2 (biased), k3 = r - 1 - log r (unbiased, not negative).

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio
