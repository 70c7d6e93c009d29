"""What a policy phase reports."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_core.batches.sequences import Samples, Vector
from trainer_core.model.segments import Segments
from trainer_core.objective_config import Correction
from trainer_core.objectives.losses.correction import importance_weights
from trainer_core.objectives.losses.kl import kl_estimate
from trainer_core.objectives.losses.log_ratio import log_ratio
from trainer_core.objectives.update import Update, mean_auxiliary_loss

NOTHING_LEARNED = {"grad_norm": 0.0, "steps": 0.0, "tokens": 0.0}
"""Of an iteration of which no sample is left to train on."""


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
    """Mean k3 estimate of KL(old || other) from log other - log old at the tokens that old has drawn."""
    return float(kl_estimate(torch.from_numpy(change).double(), "k3").mean())


def engine_difference(samples: Samples, logprobs: Vector, counted: NDArray[np.bool_]) -> dict[str, float]:
    """How far the policy that drew the samples is from the trainer's, over the tokens that count."""
    engine, trainer = samples.engine_logprobs[counted], logprobs[counted]
    difference = np.abs(engine - trainer)
    change = log_ratio(torch.from_numpy(trainer).double(), torch.from_numpy(engine).double())
    return {
        "engine_logprob_diff_mean": float(difference.mean()),
        "engine_logprob_diff_max": float(difference.max()),
        "engine_kl": float(kl_estimate(change, "k3").mean()),
    }


def correction_effect(
    correction: Correction, samples: Samples, logprobs: Vector, chosen: NDArray[np.bool_]
) -> dict[str, float]:
    """Mean weight of the importance sampling, and the share of tokens whose ratio was out of range."""
    if correction.type == "none":
        return {}
    counted = samples.per_response_token(chosen)
    segments = Segments(torch.from_numpy(samples.response_lengths[chosen]))
    trainer, behaviour = (torch.from_numpy(values[counted]) for values in (logprobs, samples.engine_logprobs))
    weights = importance_weights(correction, trainer, behaviour, segments)
    limited = weights == (correction.limit if correction.type == "truncate" else 0.0)
    return {"correction_weight": float(weights.mean()), "correction_fraction": float(limited.float().mean())}
