"""An objective of one's own: advantages by rank, and a loss whose ratio fades instead of being clipped.

In the configuration: [train.policy]
                      mini_batches = 2
                      advantage = { type = "custom", function = "objective.py:ranked" }
                      [train.policy.loss]
                      type = "custom"
                      function = "objective.py:Fading"
                      arguments = { width = 0.3 }
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ratchet import ScoredSamples, Tokens


def ranked(scored: "ScoredSamples") -> np.ndarray:
    """(N,) rank of each sample's reward within its prompt's group, from -1 to 1; equal rewards share their mean rank.

    `scored` has rewards, groups, usable and lengths, (N,) each; a sample that is not usable counts nowhere.
    """
    found = np.zeros(len(scored.rewards), dtype=np.float32)
    for group in np.unique(scored.groups[scored.usable]):
        rows = np.flatnonzero(scored.usable & (scored.groups == group))
        rewards = scored.rewards[rows]
        if len(rows) > 1:
            below, above = (rewards[:, None] > rewards).sum(1), (rewards[:, None] < rewards).sum(1)
            found[rows] = (below - above) / (len(rows) - 1)
    return found


class Fading:
    """Loss -A w tanh(log ratio / w): near the old policy the policy gradient, far from it none.

    An instance is made once in each rank. It must remember nothing between calls: only weights and the optimizer's
    state are stored, so that a run could not be continued exactly.
    """

    def __init__(self, width: float = 0.2) -> None:
        """Width in nats."""
        self.width = width

    def __call__(self, tokens: "Tokens") -> tuple[torch.Tensor, torch.Tensor]:
        """(R,) loss of each response token, and (R,) 1 where it counts as clipped for the report.

        `tokens` has logprobs, old_logprobs, their bounded difference log_ratio, and advantages, (R,) each.
        """
        change = tokens.log_ratio / self.width
        return -tokens.advantages * self.width * torch.tanh(change), (change.abs() > 1).float()
