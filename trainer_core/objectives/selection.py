"""Which samples of an iteration are trained on. Imports no torch."""

import numpy as np
from numpy.typing import NDArray

from trainer_core.batches.sequences import Samples
from trainer_core.objective_config import LikelihoodLoss, PolicyConfig
from trainer_core.objectives.advantages.group import members_of
from trainer_core.objectives.advantages.overlong import shaped_rewards


def trained_on(policy: PolicyConfig, samples: Samples) -> NDArray[np.bool_]:
    """(N,) whether a sample is part of the objective: usable, and not left out by a setting.

    In this order: responses that are too long (`overlong`), prompts without spread (`leave_out_equal_groups`), prompts
    beyond `most_groups`, and samples that maximum likelihood does not imitate (`loss.type = "sft"`).
    """
    chosen = samples.usable
    if policy.overlong.type == "leave_out":
        chosen = chosen & (samples.response_lengths < policy.overlong.length)
    if policy.leave_out_equal_groups:
        chosen = with_spread(samples.rewards, samples.groups, chosen)
    if policy.most_groups is not None:
        chosen = chosen & np.isin(samples.groups, first_groups(samples.groups, chosen, policy.most_groups))
    if policy.loss.type == "sft":
        rewards = shaped_rewards(policy.overlong, samples.rewards, samples.response_lengths)
        chosen = imitated(policy.loss, rewards, samples.groups, chosen)
    return chosen


def with_spread(
    rewards: NDArray[np.float32], groups: NDArray[np.int32], usable: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """(N,) usable samples of groups in which not all rewards are equal.

    Source: dynamic sampling, DAPO (arXiv 2503.14476) section 3.2, which samples more prompts instead; here
    the groups that are left are all.
    """
    found = np.zeros(len(rewards), dtype=np.bool_)
    for members in members_of(groups, usable):
        found[members] = np.ptp(rewards[members]) > 0
    return found


def first_groups(groups: NDArray[np.int32], usable: NDArray[np.bool_], most: int) -> NDArray[np.int32]:
    """The numbers of the first `most` groups that have usable samples, in the order of the samples."""
    numbers, first = np.unique(groups[usable], return_index=True)
    return numbers[np.argsort(first)][:most]


def imitated(
    loss: LikelihoodLoss, rewards: NDArray[np.float32], groups: NDArray[np.int32], usable: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """(N,) the usable samples with a reward above `loss.above`; with `loss.best` only the best of each group.

    Source: rejection sampling, Llama 2 (arXiv 2307.09288) and RAFT (arXiv 2304.06767).
    """
    kept = np.zeros(len(rewards), dtype=np.bool_)
    kept[usable] = rewards[usable] > loss.above
    if not loss.best:
        return kept
    best = [members[np.argmax(rewards[members])] for members in members_of(groups, kept)]
    return np.isin(np.arange(len(rewards)), best)
