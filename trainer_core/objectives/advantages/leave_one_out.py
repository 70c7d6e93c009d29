"""Advantages against the other samples of a prompt: RLOO. Imports no torch."""

import numpy as np
from numpy.typing import NDArray

from trainer_core.objectives.advantages.group import members_of


def leave_one_out_advantages(
    rewards: NDArray[np.float32], groups: NDArray[np.int32], usable: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Each sample's reward minus the mean reward of the other usable samples of its group.

    Sources: RLOO, "Back to Basics" (arXiv 2402.14740); Kool et al., "Buy 4 REINFORCE samples, get a baseline
    for free!" (2019).

    (N,) rewards, (N,) group numbers, (N,) usable -> (N,) advantages: r_i - sum of r_j over j != i / (n - 1), which is
    n / (n - 1) (r_i - mean). Zero for samples that are not usable and for groups with a single usable sample.
    """
    advantages = np.zeros(len(rewards), dtype=np.float32)
    for members in members_of(groups, usable):
        scores, count = rewards[members].astype(np.float64), len(members)
        if count > 1 and np.ptp(scores) > 0:
            advantages[members] = (scores - scores.mean()) * count / (count - 1)
    return advantages
