"""Samples of an iteration that are trained on, and their weights. Imports no torch."""

import numpy as np
from numpy.typing import NDArray

from trainer_core.batches.sequences import Samples, Vector
from trainer_core.objectives.advantage_config import OverlongLeftOut
from trainer_core.objectives.advantages import shaped_rewards
from trainer_core.objectives.loss_config import LikelihoodLoss, PairLoss
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.preference import preferred_pairs
from trainer_core.objectives.scored import members_of, scored_of

Mask = NDArray[np.bool_]
Units = NDArray[np.int64]  # (n,) rows of samples, or (P, 2) pairs of them: a mini-batch holds some of these


def units_of(policy: PolicyConfig, samples: Samples) -> Units:
    """Rows, or pairs of rows, of which mini-batches are made: all branches of a sample, or of a pair the last ones."""
    chosen = trained_on(policy, samples)
    if not isinstance(policy.loss, PairLoss):
        return np.flatnonzero(chosen[samples.owners] & samples.usable)
    scored = scored_of(samples, samples.usable)
    rewards = shaped_rewards(policy.overlong, scored.rewards, scored.lengths)
    return samples.rows[preferred_pairs(policy.loss, rewards, scored.groups, chosen)]


def trained_on(policy: PolicyConfig, samples: Samples) -> NDArray[np.bool_]:
    """(M,) True for each sample that is part of the objective: usable, and not left out by a setting. In this order:
    responses that are too long (`overlong`), prompts without spread (`leave_out_equal_groups`), prompts beyond
    `most_groups`, and samples that maximum likelihood does not imitate (`loss.type = "sft"`)."""
    scored = scored_of(samples, samples.usable)
    chosen, groups = scored.usable, scored.groups
    if isinstance(policy.overlong, OverlongLeftOut):
        chosen = chosen & (scored.lengths < policy.overlong.length)
    if policy.leave_out_equal_groups:
        chosen = with_spread(scored.rewards, groups, chosen)
    if policy.most_groups is not None:
        numbers, first = np.unique(groups[chosen], return_index=True)
        chosen = chosen & np.isin(groups, numbers[np.argsort(first)][: policy.most_groups])
    if isinstance(policy.loss, LikelihoodLoss):
        rewards = shaped_rewards(policy.overlong, scored.rewards, scored.lengths)
        chosen = imitated(policy.loss, rewards, groups, chosen)
    return chosen


def with_spread(rewards: Vector, groups: NDArray[np.int32], usable: Mask) -> Mask:
    """(N,) usable samples of groups in which not all rewards are equal. Source: dynamic sampling, DAPO (arXiv
    2503.14476) section 3.2, which samples more prompts instead; here the remaining groups are all."""
    found = np.zeros(len(rewards), dtype=np.bool_)
    for members in members_of(groups, usable):
        found[members] = np.ptp(rewards[members]) > 0
    return found


def imitated(loss: LikelihoodLoss, rewards: Vector, groups: NDArray[np.int32], usable: Mask) -> Mask:
    """(N,) usable samples with a reward above `loss.above`; with `loss.best` only the best of each group. Source:
    rejection sampling, Llama 2 (arXiv 2307.09288) and RAFT (arXiv 2304.06767)."""
    kept = np.zeros(len(rewards), dtype=np.bool_)
    kept[usable] = rewards[usable] > loss.above
    if not loss.best:
        return kept
    best = [members[np.argmax(rewards[members])] for members in members_of(groups, kept)]
    return np.isin(np.arange(len(rewards)), best)


def sequence_weights(
    policy: PolicyConfig,
    response_lengths: NDArray[np.int64],
    groups: NDArray[np.int32],
    owners: NDArray[np.int64] | None = None,
) -> Vector:
    """Weight of each sequence's summed loss in the loss of a mini-batch: (n,) tokens, (n,) group numbers -> (n,).
    `owners` are the (n,) numbers of their samples; by default each is one of its own.

    "token" weighs all tokens equally (DAPO, arXiv 2503.14476 section 3.3), "sequence" gives every sample the same
    weight in all (GRPO, arXiv 2402.03300 equation 3), "group" every prompt group, and within it every token. Their
    weights times lengths sum to the number of tokens, by which Megatron divides the sum over all micro-batches and
    data-parallel ranks. "constant" divides the sum over a sample by `loss_length` instead of its own length
    (Dr. GRPO, arXiv 2503.20783), so that long responses weigh more. The values of pairs are shares of their mean."""
    count, total, aggregation = len(response_lengths), response_lengths.sum(), policy.loss_aggregation
    samples = np.arange(count) if owners is None else owners
    if policy.loss.paired:
        return np.full(count, total, dtype=np.float32)
    if aggregation == "token":
        return np.ones(count, dtype=np.float32)
    if aggregation == "constant":
        whole = len(np.unique(samples)) * (policy.loss_length or 1)
        return np.full(count, total / whole, dtype=np.float32)
    members = samples if aggregation == "sequence" else groups
    _, unit = np.unique(members, return_inverse=True)  # samples or groups, which get equal shares
    tokens = np.bincount(unit, response_lengths)  # of each unit
    shares = total / (np.count_nonzero(tokens) * np.maximum(tokens, 1))
    return shares[unit].astype(np.float32)
