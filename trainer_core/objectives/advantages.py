"""Advantages: what a sample's reward is compared with. Imports no torch.

Each is a function of the samples of an iteration, as `trainer_core.objectives.registry` names it."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer_core.batches.sequences import response_sums
from trainer_core.objectives.advantage_config import GeneralizedAdvantage, Overlong, OverlongPenalty
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


def token_returns(
    policy: PolicyConfig, scored: ScoredSamples, penalties: NDArray[np.float64] | None
) -> NDArray[np.float32]:
    """(R,) returns that a critic learns: generalised advantages, not normalised, plus the values they were made with.
    The arguments are those of `token_advantages`."""
    assert isinstance(policy.advantage, GeneralizedAdvantage) and scored.values is not None
    rewards = shaped_rewards(policy.overlong, scored.rewards, scored.lengths)
    given = replace(scored, rewards=rewards, penalties=penalties)
    return (gae(given, policy.advantage.gamma, policy.advantage.gae_lambda) + scored.values).astype(np.float32)


def sample_advantages(policy: PolicyConfig, scored: ScoredSamples) -> NDArray[np.float32] | None:
    """(N,) advantages for display, without the KL in the reward. None if the loss weighs none, if those of a teacher
    or a critic decide with them, or if code of the user's own computes them: that runs in the trainer's ranks alone."""
    if not policy.needs_advantages or policy.distill is not None:
        return None
    if policy.advantage.runs_user_code or policy.advantage.needs_values:
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
    for free!" (2019)."""
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

    Source: REINFORCE++ (arXiv 2501.03262), with global advantage normalisation, and REINFORCE++-baseline."""
    rewards = _centred(scored) if baseline else scored.rewards.astype(np.float64)
    returns = returns_to_go(rewards, scored.penalties, scored.lengths)
    return _normalized(returns, np.repeat(scored.usable, scored.lengths))


def generalized_advantages(
    scored: ScoredSamples, gamma: float, gae_lambda: float, normalize: bool
) -> NDArray[np.float32]:
    """(R,) generalised advantages of each token, normalised over all tokens that count as `batch_advantages`, or not.
    Zero for tokens that do not count."""
    found, counted = gae(scored, gamma, gae_lambda), np.repeat(scored.usable, scored.lengths)
    return _normalized(found, counted) if normalize else np.where(counted, found, 0).astype(np.float32)


def gae(scored: ScoredSamples, gamma: float, gae_lambda: float) -> NDArray[np.float64]:
    """(R,) advantage of each response token, A_t = d_t + gamma lambda A_t+1 with d_t = r_t + gamma V_t+1 - V_t. The
    reward comes with the last token of a response, behind which V and A are 0; the penalties with each. Tokens that the
    policy has not sampled are not steps. Source: GAE (arXiv 1506.02438) equation 16."""
    assert scored.values is not None, "the trainer gives the values of its critic"
    lengths, values = scored.lengths, scored.values.astype(np.float64)
    last = np.cumsum(lengths)[lengths > 0] - 1
    found = np.zeros(len(values)) if scored.penalties is None else -scored.penalties
    found[last] += scored.rewards[lengths > 0]
    following = np.append(values[1:], 0.0)
    following[last] = 0.0
    found += gamma * following - values  # d
    ahead = last[np.argsort(-lengths[lengths > 0], kind="stable")]  # of long responses first
    remaining = np.sort(lengths[lengths > 0])[::-1]
    for step in range(1, int(lengths.max(initial=0))):
        places = ahead[: np.searchsorted(-remaining, -step)] - step  # of responses with more than `step` tokens
        found[places] += gamma * gae_lambda * found[places + 1]
    return found


def _normalized(values: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float32]:
    """(R,) values minus their mean over the tokens that count, divided by their standard deviation; 0 for others, and
    for all if they are equal."""
    found, given = np.zeros(len(values), dtype=np.float32), values[counted]
    if len(given) > 1 and np.ptp(given) > 0:
        found[counted] = (given - given.mean()) / np.sqrt(given.var(ddof=1) + _VARIANCE_FLOOR)
    return found


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
