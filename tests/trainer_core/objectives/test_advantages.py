"""Advantages by hand, and those of a configuration against a straightforward implementation."""

import math
from dataclasses import replace

import numpy as np
import pytest

from trainer_core.objectives.advantage_config import NoOverlong, OverlongLeftOut, OverlongPenalty
from trainer_core.objectives.advantages import (
    batch_advantages,
    gae,
    group_advantages,
    leave_one_out_advantages,
    returns_to_go,
    sample_advantages,
    shaped_rewards,
    token_advantages,
    token_returns,
)
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.scored import ScoredSamples

LENGTHS = np.array([2, 0, 3, 1, 4, 2])
GROUPS = np.array([0, 0, 0, 5, 5, 5], dtype=np.int32)
REWARDS = np.array([0.2, np.nan, 1.0, -0.5, 0.7, 0.1], dtype=np.float32)
USABLE = np.array([True, False, True, True, True, True])
SCORED = ScoredSamples(REWARDS, GROUPS, USABLE, LENGTHS)
PENALTIES = np.random.default_rng(0).normal(size=LENGTHS.sum())


def scored(rewards, groups=None, usable=None, **more):
    """Samples of one token each."""
    count = len(rewards)
    return ScoredSamples(
        np.array(rewards, dtype=np.float32),
        np.array([0] * count if groups is None else groups, dtype=np.int32),
        np.array([True] * count if usable is None else usable, dtype=bool),
        more.pop("lengths", np.ones(count, dtype=np.int64)),
        **more,
    )


def test_group_advantages_by_hand():
    # group 0: mean 0.5, standard deviation (n - 1) sqrt(1/3); group 1: mean 2, standard deviation sqrt(2)
    found = group_advantages(scored([0, 1, 0, 1, 1, 3], [0, 0, 0, 0, 1, 1]))
    scale = 0.5 / math.sqrt(1 / 3)
    np.testing.assert_allclose(found, [-scale, scale, -scale, scale, -math.sqrt(0.5), math.sqrt(0.5)], rtol=1e-5)


def test_group_advantages_without_division():
    np.testing.assert_allclose(group_advantages(scored([0, 1, 5]), normalize_by_std=False), [-2, -1, 3])


@pytest.mark.parametrize("reward", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
def test_equal_rewards_give_exactly_no_advantage(advantages, reward):
    assert advantages(scored([reward] * 7 + [0, 1], [3] * 7 + [4, 4]))[:7].tolist() == [0] * 7


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
def test_what_is_not_usable_does_not_count(advantages):
    with_it = advantages(scored([0, 1, math.nan, 5], usable=[True, True, False, True]))
    assert with_it[2] == 0
    assert np.delete(with_it, 2).tolist() == advantages(scored([0, 1, 5])).tolist()


@pytest.mark.parametrize("usable", [[True, False], [False, False]])
@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
def test_a_lone_sample_has_no_advantage(advantages, usable):
    assert advantages(scored([1, 0], usable=usable)).tolist() == [0, 0]


def test_each_sample_is_compared_with_the_others():
    found = leave_one_out_advantages(scored([0, 1, 5, 2, 4], [7, 7, 7, 3, 3]))
    assert found.tolist() == [-3, -1.5, 4.5, -2, 2]


def test_a_return_is_the_reward_without_the_penalties_that_follow():
    found = returns_to_go(np.array([1.0, -2.0]), np.array([0.1, 0.2, 0.4, 1.0, 3.0]), np.array([3, 0, 2])[[0, 2]])
    np.testing.assert_allclose(found, [1 - 0.7, 1 - 0.6, 1 - 0.4, -2 - 4, -2 - 3])


def test_a_response_without_tokens_has_no_return():
    found = returns_to_go(np.array([1.0, 9.0, 2.0]), np.array([0.5, 0.25]), np.array([1, 0, 1]))
    np.testing.assert_allclose(found, [0.5, 1.75])


def test_without_penalties_every_token_has_the_reward():
    assert returns_to_go(np.array([1.0, 2.0]), None, np.array([2, 1])).tolist() == [1, 1, 2]


def test_returns_are_normalised_over_the_tokens_that_count():
    found = batch_advantages(scored([1.0, 2.0, np.nan, 6.0], usable=[True, True, False, True]))
    # mean 3, variance (4 + 1 + 9) / 2 = 7
    np.testing.assert_allclose(found, np.array([-2, -1, 0, 3]) / np.sqrt(7), rtol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_equal_returns_give_no_advantage(count):
    assert batch_advantages(scored([0.1] * count)).tolist() == [0] * count


def test_the_baseline_is_the_mean_of_the_group():
    given = scored([1, 2, 3, 7, 0.1], [0, 0, 0, 4, 4], [True, True, False, True, True])
    centred = np.array([-0.5, 0.5, 0, 3.45, -3.45])
    kept = centred[given.usable]
    scale = np.sqrt(kept.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(batch_advantages(given, baseline=True), centred / scale, rtol=1e-6)


def test_the_penalty_of_long_responses_by_hand():
    """DAPO's equation 13 with L_max = 10 and L_cache = 4."""
    lengths = np.array([1, 6, 7, 9, 10, 11])
    found = shaped_rewards(OverlongPenalty(length=10, buffer=4), np.ones(6, dtype=np.float32), lengths)
    assert found.dtype == np.float32
    assert found.tolist() == [1, 1, 0.75, 0.25, 0, 0]


def test_the_penalty_has_a_factor():
    found = shaped_rewards(OverlongPenalty(length=4, buffer=2, factor=0.5), np.zeros(2, np.float32), np.array([3, 4]))
    assert found.tolist() == [-0.25, -0.5]


@pytest.mark.parametrize("overlong", [NoOverlong(), OverlongLeftOut(length=1)])
def test_otherwise_rewards_are_as_they_were(overlong):
    assert shaped_rewards(overlong, np.array([0.5], np.float32), np.array([9])).tolist() == [0.5]


def plain(policy, penalties):
    """The same, sample by sample and token by token."""
    parts = np.split(penalties, np.cumsum(LENGTHS)[:-1])
    others = {n: [m for m in range(6) if USABLE[m] and GROUPS[m] == GROUPS[n]] for n in range(6)}
    if policy.advantage.type == "reinforce_pp":
        tokens = {}
        for n in np.flatnonzero(USABLE):
            base = np.mean([float(REWARDS[m]) for m in others[n]]) if policy.advantage.baseline else 0.0
            for t in range(LENGTHS[n]):
                tokens[n, t] = float(REWARDS[n]) - base - sum(parts[n][t:])
        values = np.array(list(tokens.values()))
        scale = np.sqrt(values.var(ddof=1) + 1e-8)
        return [
            (tokens[n, t] - values.mean()) / scale if USABLE[n] else 0.0 for n in range(6) for t in range(LENGTHS[n])
        ]
    rewards = {n: float(REWARDS[n]) - sum(parts[n]) for n in range(6)}
    found = []
    for n in range(6):
        group = [rewards[m] for m in others[n]]
        if not USABLE[n]:
            value = 0.0
        elif policy.advantage.type == "rloo":
            rest = [rewards[m] for m in others[n] if m != n]
            value = rewards[n] - np.mean(rest)
        else:
            scale = np.std(group, ddof=1) + 1e-6 if policy.normalize_by_std else 1.0
            value = (rewards[n] - np.mean(group)) / scale
        found += [value] * LENGTHS[n]
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normalize_by_std": False},
        {"advantage": {"type": "rloo"}},
        {"advantage": {"type": "reinforce_pp"}},
        {"advantage": {"type": "reinforce_pp", "baseline": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize("penalised", [False, True])
def test_advantages_are_those_of_a_plain_implementation(settings, penalised):
    policy = PolicyConfig.model_validate(settings)
    found = token_advantages(policy, SCORED, PENALTIES if penalised else None)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, plain(policy, PENALTIES if penalised else 0 * PENALTIES), rtol=2e-5, atol=1e-6)


def test_a_long_response_is_rewarded_less():
    policy = PolicyConfig.model_validate(
        {"normalize_by_std": False, "overlong": {"type": "penalty", "length": 4, "buffer": 2}}
    )
    found = token_advantages(policy, SCORED)
    rewards = [-0.5, 0.7 - 1, 0.1]  # of the last group: 1, 4 and 2 tokens
    np.testing.assert_allclose(found[5:], np.repeat(np.array(rewards) - np.mean(rewards), [1, 4, 2]), rtol=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_pp"])
def test_people_see_one_advantage_a_sample(kind):
    policy = PolicyConfig.model_validate({"advantage": {"type": kind}})
    found = sample_advantages(policy, SCORED)
    assert found[1] == 0
    assert np.array_equal(np.repeat(found, LENGTHS), token_advantages(policy, SCORED))


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_losses_without_advantages_show_none(kind):
    assert sample_advantages(PolicyConfig.model_validate({"loss": {"type": kind}}), SCORED) is None


def gae_by_loops(reward, values, gamma, gae_lambda, penalties=None):
    """GAE of one response by its definition: a sum over all later steps for each step."""
    steps, penalties = len(values), penalties or [0.0] * len(values)
    rewards = [-penalty + reward * (step == steps - 1) for step, penalty in enumerate(penalties)]
    following = [*values[1:], 0.0]
    errors = [rewards[step] + gamma * following[step] - values[step] for step in range(steps)]
    return [
        sum((gamma * gae_lambda) ** (later - step) * errors[later] for later in range(step, steps))
        for step in range(steps)
    ]


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.99, 0.0)])
def test_gae_and_its_returns_are_those_of_a_double_loop(gamma, gae_lambda):
    generator = np.random.default_rng(1)
    lengths = np.append(generator.integers(0, 12, 40), 1)
    values, penalties = (generator.normal(size=lengths.sum()).astype(np.float32) for _ in range(2))
    rewards, usable = generator.normal(size=41).astype(np.float32), (lengths > 0) & (generator.random(41) < 0.8)
    given = ScoredSamples(rewards, np.zeros(41, dtype=np.int32), usable, lengths, penalties.astype(float), values)
    parts = [np.split(one.astype(float), np.cumsum(lengths)[:-1]) for one in (values, penalties)]
    expected = np.concatenate(
        [gae_by_loops(float(r), list(v), gamma, gae_lambda, list(p)) for r, v, p in zip(rewards, *parts, strict=True)]
    )
    np.testing.assert_allclose(gae(given, gamma, gae_lambda), expected, rtol=1e-12, atol=1e-12)
    advantage = {"type": "gae", "gamma": gamma, "gae_lambda": gae_lambda}
    counted, policy = np.repeat(usable, lengths), PolicyConfig.model_validate({"advantage": advantage})
    returns = token_returns(policy, replace(given, penalties=None), given.penalties)
    np.testing.assert_allclose(returns, expected + values, rtol=1e-6, atol=1e-6)
    found = token_advantages(policy, given, given.penalties)
    chosen = expected[counted]
    np.testing.assert_allclose(found[counted], (chosen - chosen.mean()) / chosen.std(ddof=1), rtol=1e-5, atol=1e-6)
    assert not found[~counted].any()
    plain = PolicyConfig.model_validate({"advantage": advantage | {"normalize": False}})
    np.testing.assert_allclose(token_advantages(plain, given, given.penalties)[counted], chosen, rtol=1e-6, atol=1e-6)
    assert sample_advantages(policy, given) is None  # they need the critic
