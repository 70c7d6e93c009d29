"""Settings of the objective: those without effect are refused, and so is counting anything twice."""

import pytest
from pydantic import ValidationError

from storage.errors import InputError
from trainer_core.objectives.objective_config import PolicyConfig, check_sampling

CORRECTIONS = [{"correction": {"type": "truncate"}}, {"correction": {"type": "mask"}}, {"old_policy": "behaviour"}]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss": {"type": "gspo"}, "clip_low": 0.1}, "clip_low has no effect with loss.type"),
        ({"loss": {"type": "cispo"}, "clip_high": 0.1}, "clip_high has no effect with loss.type"),
        ({"loss": {"type": "sft"}, "advantage": {"type": "rloo"}}, 'or give it its default, advantage.type = "grpo"'),
        ({"loss": {"type": "sft"}, "normalize_by_std": False}, "or give it its default, normalize_by_std = true"),
        ({"loss": {"type": "sft"}, "correction": {"type": "mask"}}, "correction has no effect"),
        ({"loss": {"type": "sft"}, "old_policy": "behaviour"}, "old_policy has no effect"),
        ({"kl_in": "reward"}, "kl_in has no effect with kl_coefficient = 0"),
        ({"loss": {"type": "dpo"}, "kl_coefficient": 0.1}, "kl_coefficient has no effect"),
        ({"loss": {"type": "dpo"}, "loss_aggregation": "sequence"}, "loss_aggregation has no effect"),
        ({"advantage": {"type": "rloo"}, "normalize_by_std": False}, "normalize_by_std has no effect with advantage"),
        ({"kl_estimator": "k2"}, "kl_estimator has no effect with kl_coefficient = 0"),
        ({"kl_estimator": "k1", "kl_coefficient": 0.1}, 'kl_coefficient has no effect with kl_estimator = "k1" in the'),
        ({"clip_high": 0.28}, "clip_high has no effect with mini_batches = 1, epochs = 1 and old_policy"),
        ({"loss": {"type": "clip", "dual_limit": 3}}, r"loss\.dual_limit has no effect with mini_batches = 1"),
        ({"loss": {"type": "gspo", "clip_low": 0.1}}, r"loss\.clip_low = 0.0003"),
        ({"loss": {"type": "cispo", "clip_high": 2}}, r"loss\.clip_high has no effect"),
        (
            {"loss": {"type": "dpo"}, "leave_out_equal_groups": True},
            'equal_groups has no effect with loss.type = "dpo"',
        ),
        ({"loss_aggregation": "constant"}, "need each other"),
        ({"loss_length": 7}, "need each other"),
        ({"old_policy": "behaviour", "correction": {"type": "truncate"}}, "would count it twice"),
        ({"correction": {"type": "mask", "low": 3.0}}, "nothing would count"),
        ({"overlong": {"type": "penalty", "length": 4, "buffer": 5}}, "buffer 5 is above length 4"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(settings, named):
    with pytest.raises(ValidationError, match=named):
        PolicyConfig.model_validate(settings)


@pytest.mark.parametrize("settings", CORRECTIONS, ids=str)
def test_a_nucleus_has_log_probabilities_of_its_own(settings):
    policy = PolicyConfig.model_validate(settings)
    assert policy.needs_behaviour
    for where, value, whole in (("rollout.top_p", 0.9, 1), ("rollout.top_k", 50, 0), ("rollout.min_p", 0.1, 0)):
        check_sampling(policy, whole, where, whole)
        with pytest.raises(InputError, match=rf"{where} is {value}, .* set {where} to {whole}"):
            check_sampling(policy, value, where, whole)


def test_without_them_a_nucleus_may_be_sampled():
    assert not PolicyConfig().needs_behaviour
    check_sampling(PolicyConfig(), 0.5, "rollout.top_p", 1)


@pytest.mark.parametrize(
    ("settings", "needed"), [({}, False), ({"kl_coefficient": 0.1}, True), ({"loss": {"type": "dpo"}}, True)]
)
def test_who_needs_a_reference(settings, needed):
    assert PolicyConfig.model_validate(settings).needs_reference is needed


@pytest.mark.parametrize("more", [{"mini_batches": 2}, {"epochs": 2}, {"old_policy": "behaviour"}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{"clip_high": 0.28}, {"loss": {"type": "clip", "dual_limit": 3}}, {"loss": {"type": "gspo", "clip_low": 0.1}}],
)
def test_clipping_has_an_effect_where_ratios_differ_from_1(settings, more):
    PolicyConfig.model_validate({**settings, **more})


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_estimator": "k1", "kl_coefficient": 0.1, "kl_in": "reward"},
        {"kl_estimator": "k2", "kl_coefficient": 0.1},
        {"loss": {"type": "dpo"}, "leave_out_equal_groups": True, "most_groups": 3},
        {"loss": {"type": "gspo"}, "advantage": {"type": "reinforce_pp"}, "kl_coefficient": 0.1, "kl_in": "reward"},
    ],
    ids=str,
)
def test_settings_with_an_effect_pass(settings):
    PolicyConfig.model_validate(settings)
