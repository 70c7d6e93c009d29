"""Advantages over all samples of an iteration: REINFORCE++. Imports no torch."""

import numpy as np
from numpy.typing import NDArray

from trainer_core.objectives.advantages.group import members_of

_VARIANCE_FLOOR = 1e-8  # as in OpenRLHF and verl


def batch_advantages(returns: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Each token's return, centred and divided by the standard deviation over all tokens that count.

    Source: global advantage normalisation, REINFORCE++ (arXiv 2501.03262).

    (R,) returns of response tokens, (R,) whether they count -> (R,) advantages, (G - mean) / sqrt(var + 1e-8), var with
    n - 1. Zero for tokens that do not count, and for all if their returns are equal.
    """
    advantages = np.zeros(len(returns), dtype=np.float32)
    given = returns[counted]
    if len(given) > 1 and np.ptp(given) > 0:
        advantages[counted] = (given - given.mean()) / np.sqrt(given.var(ddof=1) + _VARIANCE_FLOOR)
    return advantages


def centred(rewards: NDArray[np.float32], groups: NDArray[np.int32], usable: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(N,) rewards minus the mean of the group's usable samples, as in REINFORCE++-baseline; 0 if unusable."""
    found = np.zeros(len(rewards))
    for members in members_of(groups, usable):
        scores = rewards[members].astype(np.float64)
        found[members] = scores - scores.mean() if np.ptp(scores) > 0 else 0.0
    return found


def returns_to_go(
    rewards: NDArray[np.float64], penalties: NDArray[np.float64] | None, lengths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The return of each token: the response's reward minus the penalties of this token and those after it.

    Source: REINFORCE++ (arXiv 2501.03262), A_t = r - beta sum of KL(i) over i >= t.

    (N,) rewards, (R,) penalties of response tokens or None, (N,) response lengths -> (R,).
    """
    spread = np.repeat(rewards, lengths)
    if penalties is None:
        return spread
    before = np.cumsum(penalties) - penalties  # of all earlier tokens, over sequence boundaries
    ends = np.cumsum(lengths)
    total = np.append(0.0, np.cumsum(penalties))[ends]  # up to the end of each sequence
    return spread - (np.repeat(total, lengths) - before)
