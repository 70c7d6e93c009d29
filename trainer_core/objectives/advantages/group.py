"""Advantages within prompt groups: GRPO and Dr. GRPO. Imports no torch."""

import numpy as np
from numpy.typing import NDArray

_STD_FLOOR = 1e-6  # keeps the division finite; a group without spread has zero advantages anyway


def group_advantages(
    rewards: NDArray[np.float32], groups: NDArray[np.int32], usable: NDArray[np.bool_], normalize_by_std: bool
) -> NDArray[np.float32]:
    """Each sample's reward relative to its group.

    Sources: GRPO, DeepSeekMath (arXiv 2402.03300) section 4.1; without the division Dr. GRPO (arXiv 2503.20783).

    (N,) rewards, (N,) group numbers, (N,) usable -> (N,) advantages: (r - mean) / std over the usable samples of the
    group, std with n - 1 (as in TRL and verl). Zero for samples that are not usable, for groups in which all
    rewards are equal, and for groups with a single usable sample.
    """
    advantages = np.zeros(len(rewards), dtype=np.float32)
    for members in members_of(groups, usable):
        scores = rewards[members].astype(np.float64)
        if len(members) < 2 or np.ptp(scores) == 0:
            continue
        scale = scores.std(ddof=1) + _STD_FLOOR if normalize_by_std else 1.0
        advantages[members] = (scores - scores.mean()) / scale
    return advantages


def members_of(groups: NDArray[np.int32], usable: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """The usable rows of each group, ascending, one array for each group that has any."""
    rows = np.flatnonzero(usable)
    ordered = rows[np.argsort(groups[rows], kind="stable")]
    starts = np.flatnonzero(np.diff(groups[ordered], prepend=-1))
    return np.split(ordered, starts[1:]) if len(rows) else []
