"""The report of a policy phase."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_core.batches.sequences import Samples, Vector
from trainer_core.objectives.losses import kl_estimate
from trainer_core.objectives.tokens import bounded_log_ratio
from trainer_core.phases.update import Update, mean_auxiliary_loss

NOTHING_LEARNED = {"grad_norm": 0.0, "steps": 0.0, "tokens": 0.0}
"""Report of an iteration of which no sample is left to train on."""


def mean_of(updates: Sequence[Update]) -> dict[str, float]:
    """Means over updates, and the last learning rate."""
    return {
        "loss": float(np.mean([update.loss for update in updates])),
        "grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "clip_fraction": float(np.mean([update.clip_fraction for update in updates])),
        "learning_rate": updates[-1].learning_rate,
        "steps": float(len(updates)),
        **mean_auxiliary_loss(updates),
    }


def mean_kl(change: Vector) -> float:
    """Mean k3 estimate of KL(old || other) from log other - log old at the tokens drawn by old."""
    return float(kl_estimate(torch.from_numpy(change).double(), "k3").mean())


def engine_difference(samples: Samples, logprobs: Vector, counted: NDArray[np.bool_]) -> dict[str, float]:
    """Distance between the policy that drew the samples and the trainer's, over the counted tokens."""
    engine, trainer = samples.engine_logprobs[counted], logprobs[counted]
    difference = np.abs(engine - trainer)
    change = bounded_log_ratio(torch.from_numpy(trainer).double(), torch.from_numpy(engine).double())
    return {
        "engine_logprob_diff_mean": float(difference.mean()),
        "engine_logprob_diff_max": float(difference.max()),
        "engine_kl": float(kl_estimate(change, "k3").mean()),
    }
