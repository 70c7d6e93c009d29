"""Advantages: what a sample's reward is compared with. Imports no torch.

Each is a function of the samples of an iteration, as `trainer_core.objectives.registry` names it.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer_core.batches.sequences import response_sums
from trainer_core.objectives.advantage_config import Overlong, OverlongPenalty
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.registry import advantage_of
from trainer_core.objectives.scored import ScoredSamples, members_of

_STD_FLOOR = 1e-6  # keeps the division finite; a group without spread has zero advantages anyway
_VARIANCE_FLOOR = 1e-8  # as in OpenRLHF and verl


def token_advantages(
    policy: PolicyConfig, scored: ScoredSamples, penalties: NDArray[np.float64] | None = None
) -> NDArray[np.float32]:
    """(R,) advantage of each response token, 0 where the sample does not count. `scored` has the rewards as they were
    scored, `penalties` are (R,) as `ScoredSamples.penalties`."""
    rewards, lengths = shaped_rewards(policy.overlong, scored.rewards, scored.lengths), scored.lengths
    if policy.advantage.per_token:
        return advantage_of(policy)(replace(scored, rewards=rewards, penalties=penalties))
    if penalties is not None:
        rewards = (rewards - response_sums(penalties, lengths)).astype(np.float32)
    return np.repeat(advantage_of(policy)(replace(scored, rewards=rewards)), lengths)


def sample_advantages(policy: PolicyConfig, scored: ScoredSamples) -> NDArray[np.float32] | None:
    """(N,) advantages for display, without the KL in the reward. None if the loss weighs none, if those of a teacher
    are added, or if code of the user's own computes them: that runs in the trainer's ranks alone."""
    if not policy.needs_advantages or policy.distill is not None or policy.advantage.runs_user_code:
        return None
    found = np.zeros(len(scored.lengths), dtype=np.float32)
    answered = scored.lengths > 0
    first = np.cumsum(scored.lengths) - scored.lengths  # without penalties all tokens of a response have the same
    found[answered] = token_advantages(policy, scored)[first[answered]]
    return found


def shaped_rewards(overlong: Overlong, rewards: NDArray[np.float32], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
    """(N,) rewards, (N,) response lengths in tokens -> (N,) rewards minus the penalty for a long response, if any. The
    penalty is 0 up to `length - buffer` tokens, `factor` from `length` on, and linear between them. Source: DAPO (arXiv
    2503.14476) section 3.4, soft overlong punishment."""
    if not isinstance(overlong, OverlongPenalty):
        return rewards
    excess = np.clip((lengths - (overlong.length - overlong.buffer)) / overlong.buffer, 0.0, 1.0)
    return (rewards - overlong.factor * excess).astype(np.float32)


def group_advantages(scored: ScoredSamples, normalize_by_std: bool = True) -> NDArray[np.float32]:
    """(N,) each sample's reward relative to its group: (r - mean) / std, std with n - 1 (as in TRL and verl). Zero for
    samples that are not usable, for groups in which all rewards are equal, and for groups with a single usable sample.
    Sources: GRPO, DeepSeekMath (arXiv 2402.03300) section 4.1; without the division Dr. GRPO (arXiv 2503.20783)."""
    advantages = np.zeros(len(scored.rewards), dtype=np.float32)
    for members in members_of(scored.groups, scored.usable):
        scores = scored.rewards[members].astype(np.float64)
        if len(members) < 2 or np.ptp(scores) == 0:
            continue
        scale = scores.std(ddof=1) + _STD_FLOOR if normalize_by_std else 1.0
        advantages[members] = (scores - scores.mean()) / scale
    return advantages


def leave_one_out_advantages(scored: ScoredSamples) -> NDArray[np.float32]:
    """(N,) each sample's reward minus the mean reward of the other usable samples of its group.

    This is r_i - sum of r_j over j != i / (n - 1), or n / (n - 1) (r_i - mean). Zero for samples that are not usable
    and for groups with a single usable sample.

    Sources: RLOO, "Back to Basics" (arXiv 2402.14740); Kool et al., "Buy 4 REINFORCE samples, get a baseline
    for free!" (2019).
    """
    advantages = np.zeros(len(scored.rewards), dtype=np.float32)
    for members in members_of(scored.groups, scored.usable):
        scores, count = scored.rewards[members].astype(np.float64), len(members)
        if count > 1 and np.ptp(scores) > 0:
            advantages[members] = (scores - scores.mean()) * count / (count - 1)
    return advantages


def batch_advantages(scored: ScoredSamples, baseline: bool = False) -> NDArray[np.float32]:
    """(R,) each token's return, normalised over all tokens that count: (G - mean) / sqrt(var + 1e-8), var with n - 1.

    The return G of a token is the response's reward, with `baseline` minus the group's mean, minus the penalties of
    this token and those after it. Zero for tokens that do not count, and for all if their returns are equal.

    Source: REINFORCE++ (arXiv 2501.03262), with global advantage normalisation, and REINFORCE++-baseline.
    """
    rewards = _centred(scored) if baseline else scored.rewards.astype(np.float64)
    returns = returns_to_go(rewards, scored.penalties, scored.lengths)
    counted = np.repeat(scored.usable, scored.lengths)
    advantages = np.zeros(len(returns), dtype=np.float32)
    given = returns[counted]
    if len(given) > 1 and np.ptp(given) > 0:
        advantages[counted] = (given - given.mean()) / np.sqrt(given.var(ddof=1) + _VARIANCE_FLOOR)
    return advantages


def returns_to_go(
    rewards: NDArray[np.float64], penalties: NDArray[np.float64] | None, lengths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return of each token: A_t = r - sum of the penalties at i >= t. (N,) rewards, (R,) penalties of response tokens
    or None, (N,) response lengths -> (R,)."""
    spread = np.repeat(rewards, lengths)
    if penalties is None:
        return spread
    before = np.cumsum(penalties) - penalties  # of all earlier tokens, over sequence boundaries
    ends = np.cumsum(lengths)
    total = np.append(0.0, np.cumsum(penalties))[ends]  # up to the end of each sequence
    return spread - (np.repeat(total, lengths) - before)


def _centred(scored: ScoredSamples) -> NDArray[np.float64]:
    """(N,) rewards minus the mean of the group's usable samples; 0 if unusable."""
    found = np.zeros(len(scored.rewards))
    for members in members_of(scored.groups, scored.usable):
        scores = scored.rewards[members].astype(np.float64)
        found[members] = scores - scores.mean() if np.ptp(scores) > 0 else 0.0
    return found
