"""Rewards of long responses (DAPO). Imports no torch."""

import numpy as np
from numpy.typing import NDArray

from trainer_core.objective_config import Overlong


def shaped_rewards(overlong: Overlong, rewards: NDArray[np.float32], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
    """(N,) rewards, (N,) response lengths in tokens -> (N,) rewards minus the penalty for a long response, if any.

    The penalty is 0 up to `length - buffer` tokens, `factor` from `length` on, and linear between them.

    Source: DAPO (arXiv 2503.14476) section 3.4, soft overlong punishment.
    """
    if overlong.type != "penalty":
        return rewards
    excess = np.clip((lengths - (overlong.length - overlong.buffer)) / overlong.buffer, 0.0, 1.0)
    return (rewards - overlong.factor * excess).astype(np.float32)
