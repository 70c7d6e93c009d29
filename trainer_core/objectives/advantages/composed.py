"""The advantages that a configuration asks for. Imports no torch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_core.batches.sequences import response_sums
from trainer_core.objective_config import PolicyConfig
from trainer_core.objectives.advantages.batch import batch_advantages, centred, returns_to_go
from trainer_core.objectives.advantages.group import group_advantages
from trainer_core.objectives.advantages.leave_one_out import leave_one_out_advantages
from trainer_core.objectives.advantages.overlong import shaped_rewards


@dataclass(frozen=True)
class Scored:
    """N samples with their rewards."""

    rewards: NDArray[np.float32]
    """(N,); arbitrary where `usable` is False."""
    groups: NDArray[np.int32]
    """(N,) number of the prompt group."""
    usable: NDArray[np.bool_]
    """(N,) whether the sample counts."""
    lengths: NDArray[np.int64]
    """(N,) response tokens."""


def token_advantages(
    policy: PolicyConfig, scored: Scored, penalties: NDArray[np.float64] | None = None
) -> NDArray[np.float32]:
    """Advantage of each response token.

    Args:
        policy: `advantage`, `normalize_by_std` and `overlong` of it.
        scored: the samples.
        penalties: (R,) what is subtracted from the reward at each response token, such as beta KL; 0 where the sample
            does not count. Only REINFORCE++ knows at which token a reward was lost; the others compare whole responses.

    Returns:
        (R,), 0 where the sample does not count.
    """
    rewards, lengths = shaped_rewards(policy.overlong, scored.rewards, scored.lengths), scored.lengths
    if policy.advantage.type == "reinforce_pp":
        baseline = policy.advantage.baseline
        own = centred(rewards, scored.groups, scored.usable) if baseline else rewards.astype(np.float64)
        return batch_advantages(returns_to_go(own, penalties, lengths), np.repeat(scored.usable, lengths))
    if penalties is not None:
        rewards = (rewards - response_sums(penalties, lengths)).astype(np.float32)
    if policy.advantage.type == "rloo":
        found = leave_one_out_advantages(rewards, scored.groups, scored.usable)
    else:
        found = group_advantages(rewards, scored.groups, scored.usable, policy.normalize_by_std)
    return np.repeat(found, lengths)


def sample_advantages(policy: PolicyConfig, scored: Scored) -> NDArray[np.float32] | None:
    """(N,) advantages as people see them, without the KL in the reward; None if the loss knows no advantages."""
    if policy.loss.type in ("sft", "dpo"):
        return None
    found = np.zeros(len(scored.lengths), dtype=np.float32)
    answered = scored.lengths > 0
    first = np.cumsum(scored.lengths) - scored.lengths  # without penalties all tokens of a response have the same
    found[answered] = token_advantages(policy, scored)[first[answered]]
    return found
