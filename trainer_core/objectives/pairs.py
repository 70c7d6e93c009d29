"""Pairs of samples on the way into the losses of single sequences."""

import numpy as np

from trainer_core.batches.sequences import Samples, Vector, response_sums
from trainer_core.objective_config import PreferenceLoss
from trainer_core.objectives.losses.preference import Pairs, preferences


def preference_values(loss: PreferenceLoss, samples: Samples, pairs: Pairs, log_ratios: Vector) -> dict[str, Vector]:
    """The values that `preference_loss` needs of each response token.

    Args:
        loss: of the configuration.
        samples: of the iteration.
        pairs: of the mini-batch.
        log_ratios: (R,) log-probability by the policy - by the reference of each response token.
    """
    found = preferences(loss, response_sums(log_ratios, samples.response_lengths), pairs)
    lengths = np.maximum(samples.response_lengths, 1)
    return {
        "advantages": samples.per_response_token(found.coefficients),
        "losses": samples.per_response_token(found.losses / lengths).astype(np.float32),
    }


def preference_report(samples: Samples, pairs: Pairs, log_ratios: Vector) -> dict[str, float]:
    """Number of pairs, and the share in which the policy prefers the better one more than the reference does."""
    whole = response_sums(log_ratios, samples.response_lengths)
    right = whole[pairs[:, 0]] > whole[pairs[:, 1]]
    return {"pairs": float(len(pairs)), "preference_accuracy": float(right.mean())}
