"""What a configuration makes of rewards, against straightforward implementations."""

import numpy as np
import pytest

from trainer_core.objective_config import PolicyConfig
from trainer_core.objectives.advantages.composed import Scored, sample_advantages, token_advantages

LENGTHS = np.array([2, 0, 3, 1, 4, 2])
GROUPS = np.array([0, 0, 0, 5, 5, 5], dtype=np.int32)
REWARDS = np.array([0.2, np.nan, 1.0, -0.5, 0.7, 0.1], dtype=np.float32)
USABLE = np.array([True, False, True, True, True, True])
SCORED = Scored(REWARDS, GROUPS, USABLE, LENGTHS)
PENALTIES = np.random.default_rng(0).normal(size=LENGTHS.sum())


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
