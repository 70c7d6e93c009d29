"""Numbers that cannot work are refused when a configuration is read, and never when a stored record is."""

import tomllib

import pytest

from storage.errors import InputError
from tasks.config.document import apply_override, parse_config
from tasks.config.section import LARGEST
from tests.tasks.config.test_run import MINIMAL


def config_with(*settings: str):
    document = tomllib.loads(MINIMAL)
    for setting in settings:
        apply_override(document, setting)
    return parse_config(document, "test")


@pytest.mark.parametrize(
    ("setting", "fact"),
    [
        ("train.optimizer.learning_rate=nan", "train.optimizer.learning_rate: Input should be a finite number"),
        ("rollout.temperature=inf", "rollout.temperature: Input should be a finite number"),
        ("reward.arguments.scale=nan", "reward.arguments.scale: Input should be a finite number (given: nan)"),
        (
            "reward.arguments.limits=[1, [-inf]]",
            "reward.arguments.limits.1.0: Input should be a finite number (given: -inf)",
        ),
        ("run.seed=-1", "run.seed: -1 cannot be a seed: give a whole number from 0 to 2147483647"),
        (f"run.seed={LARGEST + 1}", "run.seed: 2147483648 cannot be a seed"),
        ("train.seed=-5", "train.seed: -5 cannot be a seed"),
        (f"run.iterations={10**30}", f"run.iterations: {10**30} is too large: give at most 2147483647"),
        ("train.policy.epochs=9999999999", "train.policy.epochs: 9999999999 is too large"),
        ("workers.call_deadline_s=1e300", "workers.call_deadline_s: 1e+300 seconds are too long to wait for"),
    ],
)
def test_a_number_that_cannot_work_is_named(setting, fact):
    with pytest.raises(InputError) as refused:
        config_with(setting)
    assert fact in str(refused.value)


def test_all_of_them_are_named_at_once():
    with pytest.raises(InputError) as refused:
        config_with("run.seed=-1", "rollout.max_tokens=9999999999")
    assert str(refused.value).splitlines()[1:] == [
        "  run.seed: -1 cannot be a seed: give a whole number from 0 to 2147483647",
        "  rollout.max_tokens: 9999999999 is too large: give at most 2147483647",
    ]


@pytest.mark.parametrize(
    "setting",
    [
        f"run.seed={LARGEST}",
        f"reward.arguments.limit={10**30}",
        "train.policy.entropy_coefficient=-0.1",
        f'reward.functions=[{{name="a", function="exact_match", arguments={{seed=-1, limit={10**12}}}}}]',
    ],
)
def test_what_can_work_is_taken(setting):
    config_with(setting)


@pytest.mark.parametrize(
    ("setting", "repair"),
    [
        ("rollout.promts=3", "did you mean 'rollout.prompts'?"),
        ("reward.zebra=3", "reward.zebra: unknown key; remove it, or use one of try, function"),
        ("zzz.a=3", "zzz: unknown key; remove it, or use one of run, model, data"),
    ],
)
def test_a_key_is_suggested_only_where_one_is_near(setting, repair):
    with pytest.raises(InputError) as refused:
        config_with(setting)
    assert repair in str(refused.value)
    assert ("did you mean" in str(refused.value)) == ("did you mean" in repair)
