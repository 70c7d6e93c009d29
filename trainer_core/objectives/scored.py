"""The samples that an advantage sees. Imports no torch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_core.batches.sequences import Samples


@dataclass(frozen=True)
class ScoredSamples:
    """N samples of an iteration, with R response tokens in all, and their rewards."""

    rewards: NDArray[np.float32]
    """(N,) with the penalty of long responses subtracted; arbitrary where `usable` is False."""
    groups: NDArray[np.int32]  # (N,) number of the prompt group
    usable: NDArray[np.bool_]  # (N,) whether the sample counts
    lengths: NDArray[np.int64]  # (N,) response tokens; they sum to R
    penalties: NDArray[np.float64] | None = None
    """(R,) to subtract from the reward at each response token, such as beta KL; 0 where the sample does not count. Only
    an advantage of single tokens gets them; for others they are subtracted from `rewards`."""
    values: NDArray[np.float32] | None = None
    """(R,) returns that a critic expects from each response token on; None without a critic."""


def scored_of(samples: Samples, usable: NDArray[np.bool_]) -> ScoredSamples:
    """The M samples with all branches of each as one response; `usable` says of each of the N sequences whether it
    counts. A conversation so has one reward, one share of a baseline and one length, however often it branched."""
    rows = samples.rows
    counted = np.isin(np.arange(len(rows)), samples.owners[usable])
    lengths = samples.sample_lengths
    return ScoredSamples(samples.rewards[rows], samples.groups[rows], counted, lengths, values=samples.values)


def members_of(groups: NDArray[np.int32], usable: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Usable rows of each group, ascending, one array for each group that has any."""
    rows = np.flatnonzero(usable)
    ordered = rows[np.argsort(groups[rows], kind="stable")]
    starts = np.flatnonzero(np.diff(groups[ordered], prepend=-1))
    return np.split(ordered, starts[1:]) if len(rows) else []
