"""Direct preference optimisation, divided into losses of single sequences."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_core.model.token_loss import TokenLoss
from trainer_core.objective_config import PreferenceLoss
from trainer_core.objectives.advantages.group import members_of

Pairs = NDArray[np.int64]
"""(P, 2) rows of the preferred and of the other sample."""


@dataclass(frozen=True)
class Preferences:
    """What the pairs of a mini-batch ask of each sequence at the current weights."""

    coefficients: NDArray[np.float32]
    """(N,) minus the derivative of the mean loss by the log-probability of the whole response."""
    losses: NDArray[np.float32]
    """(N,) share of the mean loss."""


def preferred_pairs(
    loss: PreferenceLoss, rewards: NDArray[np.float32], groups: NDArray[np.int32], usable: NDArray[np.bool_]
) -> Pairs:
    """Pairs of samples of one group of which the first has the higher reward; of equal rewards there are none.

    "best_worst" pairs the best of each group with the worst, the first of those that are equal; "all" pairs every two.
    """
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


def preferences(loss: PreferenceLoss, log_ratios: NDArray[np.float64], pairs: Pairs) -> Preferences:
    """The loss and its derivatives at the current weights.

    With h = beta (log-ratio of the preferred - log-ratio of the other), a pair's loss is
    -(1 - e) log sigmoid(h) - e log sigmoid(-h), e the label smoothing. Its derivative by h is sigmoid(h) - (1 - e).

    Since the two responses of a pair meet only in h, its gradient is that of a sum over single responses with these
    derivatives as constants. So pairs need not be in one micro-batch, nor on one data-parallel rank.

    Sources: DPO (arXiv 2305.18290) equation 7 and the gradient after it; label smoothing, Mitchell, "A note on DPO with
    noisy preferences" (2023).

    Args:
        loss: beta and label smoothing.
        log_ratios: (N,) log-probability of each response by the policy - by the reference, in nats.
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
    return Preferences(coefficients.astype(np.float32), losses.astype(np.float32))


def preference_loss(logprobs: torch.Tensor, coefficients: torch.Tensor, losses: torch.Tensor) -> TokenLoss:
    """A loss with the value `losses` and the derivatives -`coefficients` by the log-probabilities; all (R,)."""
    return TokenLoss(losses - coefficients * (logprobs - logprobs.detach()), torch.zeros_like(logprobs))
