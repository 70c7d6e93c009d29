from dataclasses import replace

import numpy as np
import pytest

from tests.trainer_core.models import random_samples
from trainer_core.objectives.advantages import token_advantages
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.scored import scored_of
from trainer_core.objectives.selection import sequence_weights, trained_on, units_of

REWARDS = np.array([0, 0, 0, 1, 1, 2, 2, 1, 3, 3], dtype=np.float32)
GROUPS = np.array([4, 4, 4, 2, 2, 2, 2, 9, 9, 9], dtype=np.int32)
USABLE = np.array([True] * 7 + [False] + [True] * 2)
LENGTHS = np.array([1, 2, 9, 1, 9, 1, 1, 1, 3, 3])


@pytest.fixture
def samples():
    given = replace(random_samples(groups=1, per_group=10), response_lengths=LENGTHS)
    return replace(given, rewards=REWARDS, groups=GROUPS, usable=USABLE)


def rows(samples, settings):
    return np.flatnonzero(trained_on(PolicyConfig.model_validate(settings), samples)).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 8, 9]),
        # the remaining samples of group 9 are equal
        ({"leave_out_equal_groups": True}, [3, 4, 5, 6]),
        ({"most_groups": 1}, [0, 1, 2]),
        ({"most_groups": 2}, [0, 1, 2, 3, 4, 5, 6]),
        ({"most_groups": 1, "leave_out_equal_groups": True}, [3, 4, 5, 6]),
        ({"overlong": {"type": "leave_out", "length": 9}}, [0, 1, 3, 5, 6, 8, 9]),
        ({"loss": {"type": "sft"}}, [3, 4, 5, 6, 8, 9]),
        ({"loss": {"type": "sft", "above": 1.5}}, [5, 6, 8, 9]),
        ({"loss": {"type": "sft", "above": 1.5, "best": True}}, [5, 8]),
        ({"loss": {"type": "sft", "above": 3.0}}, []),
        # the penalty takes 1 from rows 2 and 4
        ({"loss": {"type": "sft"}, "overlong": {"type": "penalty", "length": 9, "buffer": 1}}, [3, 5, 6, 8, 9]),
    ],
    ids=str,
)
def test_what_is_trained_on(samples, settings, expected):
    assert rows(samples, settings) == expected


def test_rewards_of_unusable_samples_may_be_anything(samples):
    other = replace(samples, rewards=np.where(USABLE, REWARDS, np.nan).astype(np.float32))
    for settings in ({"leave_out_equal_groups": True}, {"loss": {"type": "sft", "best": True}}):
        assert rows(samples, settings) == rows(other, settings)


def weights(settings, lengths, groups):
    policy = PolicyConfig.model_validate(settings)
    return sequence_weights(policy, np.array(lengths), np.array(groups, dtype=np.int32))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [1, 1, 1]),
        # 6 tokens over 3 sequences that have any: each counts 2 in all
        ("sequence", [1, 2, 2 / 3]),
        # 6 tokens over 2 groups that have any: each counts 3 in all, its tokens alike
        ("group", [1, 1, 1]),
    ],
)
def test_sequence_weights_by_hand(aggregation, expected):
    found = weights({"loss_aggregation": aggregation}, [2, 1, 3, 0], [0, 0, 1, 2])
    assert found[:3].tolist() == pytest.approx(expected)


def test_groups_weigh_alike_whatever_their_size():
    found = weights({"loss_aggregation": "group"}, [1, 1, 6], [5, 5, 2])
    assert found.tolist() == pytest.approx([2, 2, 4 / 6])


def test_branches_of_a_sample_weigh_as_one():
    policy = PolicyConfig.model_validate({"loss_aggregation": "sequence"})
    lengths, groups = np.array([1, 1, 4]), np.zeros(3, np.int32)
    assert sequence_weights(policy, lengths, groups, np.array([0, 0, 1])).tolist() == pytest.approx([1.5, 1.5, 0.75])
    constant = PolicyConfig.model_validate({"loss_aggregation": "constant", "loss_length": 3})
    assert sequence_weights(constant, lengths, groups, np.array([0, 0, 1])).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("settings", "expected"), [({"loss": {"type": "sft"}}, [3, 4]), ({"most_groups": 1}, [0])])
def test_all_branches_of_a_chosen_sample_are_trained(settings, expected):
    given = replace(random_samples(groups=1, per_group=6), response_lengths=np.array([1, 1, 1, 2, 3, 4]))
    rewards, groups = np.array([0, 0, 0, 2, 2, 0], np.float32), np.array([7, 5, 5, 5, 5, 5], np.int32)
    samples = replace(
        given, rewards=rewards, groups=groups, usable=np.full(6, True), branches=np.array([1, 1, 1, 2, 1])
    )
    assert units_of(PolicyConfig.model_validate(settings), samples).tolist() == expected


def test_a_branched_sample_counts_once_in_the_baseline():
    given = replace(random_samples(groups=1, per_group=6), response_lengths=np.array([1, 1, 1, 3, 2, 2]))
    rewards, groups = np.array([1, 1, 1, 0, 0.5, 0.5], np.float32), np.zeros(6, np.int32)
    samples = replace(given, rewards=rewards, groups=groups, usable=np.full(6, True), branches=np.array([3, 1, 2]))
    scored = scored_of(samples, samples.usable)
    assert scored.lengths.tolist() == [3, 3, 4]
    advantages = token_advantages(PolicyConfig(), scored)
    assert advantages.tolist() == pytest.approx([1.0] * 3 + [-1.0] * 3 + [0.0] * 4, abs=1e-4)


def test_a_constant_divisor_is_that_of_every_sequence():
    lengths = np.array([2, 1, 3])
    found = weights({"loss_aggregation": "constant", "loss_length": 5}, lengths, [0, 0, 0])
    losses = np.array([0.3, -1.0, 4.0])  # sums over each sequence
    # Megatron divides by all 6 tokens: the rest is the mean over sequences of the sum divided by 5
    assert (found * losses).sum() / lengths.sum() == pytest.approx(losses.mean() / 5)


def test_pairs_are_summed_as_shares_of_their_mean():
    assert weights({"loss": {"type": "dpo"}}, [2, 1, 3], [0, 0, 0]).tolist() == [6, 6, 6]
