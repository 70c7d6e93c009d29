"""Losses of pairs (DPO, reward models), divided into losses of single responses. Imports no torch."""

import numpy as np
from numpy.typing import NDArray

from trainer_core.batches.sequences import Sequences, Vector, response_sums
from trainer_core.objectives.loss_config import PairLoss
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.scored import members_of

Pairs = NDArray[np.int64]  # (P, 2) rows of the preferred and of the other sample


def preferred_pairs(
    loss: PairLoss, rewards: NDArray[np.float32], groups: NDArray[np.int32], usable: NDArray[np.bool_]
) -> Pairs:
    """Pairs of samples of one group of which the first has the higher reward; of equal rewards there are none.
    "best_worst" pairs the best of each group with the worst, the first of those that are equal; "all" pairs every
    two."""
    found: list[Pairs] = [np.empty((0, 2), dtype=np.int64)]
    for members in members_of(groups, usable):
        scores = rewards[members]
        if loss.pairs == "all":
            better, worse = np.nonzero(scores[:, None] > scores[None, :])
        elif np.ptp(scores) > 0:
            better, worse = np.array([np.argmax(scores)]), np.array([np.argmin(scores)])
        else:
            continue
        found.append(np.stack((members[better], members[worse]), axis=1))
    return np.concatenate(found)


def preferences(
    loss: PairLoss, log_ratios: NDArray[np.float64], pairs: Pairs
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(N,) minus the derivative of the mean loss by each response's log-probability, (N,) shares of the mean loss.

    With h = beta (log-ratio of the preferred - log-ratio of the other), a pair's loss is
    -(1 - e) log sigmoid(h) - e log sigmoid(-h), e the label smoothing. Its derivative by h is sigmoid(h) - (1 - e).

    Since the two responses of a pair meet only in h, its gradient is that of a sum over single responses with these
    derivatives as constants. So pairs need not be in one micro-batch, nor on one data-parallel rank.

    Sources: DPO (arXiv 2305.18290) equation 7 and the gradient after it; label smoothing, Mitchell, "A note on DPO with
    noisy preferences" (2023). With beta 1 and rewards in place of log-ratios it is the loss of a reward model,
    Bradley-Terry: InstructGPT (arXiv 2203.02155) equation 1.

    Args:
        loss: beta and label smoothing.
        log_ratios: (N,) log-probability of each response by the policy - by the reference, in nats; or its reward.
        pairs: at least one.
    """
    smoothing = loss.label_smoothing
    margin = loss.beta * (log_ratios[pairs[:, 0]] - log_ratios[pairs[:, 1]])  # (P,)
    value = (1 - smoothing) * np.logaddexp(0, -margin) + smoothing * np.logaddexp(0, margin)
    slope = loss.beta * (1 - smoothing - np.exp(-np.logaddexp(0, -margin)))  # (P,) beta (1 - e - sigmoid)
    coefficients, losses = np.zeros(len(log_ratios)), np.zeros(len(log_ratios))
    for side, sign in ((0, 1.0), (1, -1.0)):
        np.add.at(coefficients, pairs[:, side], sign * slope / len(pairs))
        np.add.at(losses, pairs[:, side], value / 2 / len(pairs))
    return coefficients.astype(np.float32), losses.astype(np.float32)


def preference_values(policy: PolicyConfig, samples: Sequences, pairs: Pairs, log_ratios: Vector) -> dict[str, Vector]:
    """Values of each response token for `preference_loss` of the pairs of a mini-batch, from the (R,) log-probability
    by the policy - by the reference of each."""
    assert isinstance(policy.loss, PairLoss)
    coefficients, losses = preferences(policy.loss, response_sums(log_ratios, samples.response_lengths), pairs)
    lengths = np.maximum(samples.response_lengths, 1)
    return {
        "coefficients": samples.per_response_token(coefficients),
        "losses": samples.per_response_token(losses / lengths).astype(np.float32),
    }


def preference_report(samples: Sequences, pairs: Pairs, log_ratios: Vector) -> dict[str, float]:
    """Number of pairs, and the share in which the policy prefers the better one more than the reference does."""
    whole = response_sums(log_ratios, samples.response_lengths)
    right = whole[pairs[:, 0]] > whole[pairs[:, 1]]
    return {"pairs": float(len(pairs)), "preference_accuracy": float(right.mean())}
