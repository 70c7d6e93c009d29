"""Passing answers, and data in which nothing says that an answer passes."""

import numpy as np
import pyarrow as pa
import pytest

from storage.errors import InputError
from storage.schema import EVALUATION
from tasks.config.evaluation import EXACT
from tasks.config.reward import RewardFunction, RewardSection
from tasks.rewards.passing import check_passing, condition_of, passing

OTHERS = RewardSection(function="my_module:score")
SEVERAL = RewardSection(
    functions=(RewardFunction(name="right", function="exact_match"), RewardFunction(name="f-1", function="characters"))
)


def answers(*rows: float | dict[str, float] | None) -> pa.Table:
    """Table of rewards, of components (the reward is their sum), or without a score."""
    return pa.Table.from_pylist(
        [
            {
                "prompt_id": "p", "response_tokens": [1], "status": "ok", "detail": "", "reason": None,
                "reward": sum(one.values()) if isinstance(one, dict) else one,
                "components": list(one.items()) if isinstance(one, dict) else None,
            }
            for one in rows
        ],
        schema=EVALUATION,
    )  # fmt: skip


PARTS = answers({"right": 0, "f-1": 1}, {"right": 1, "f-1": 0.1}, None, {"f-1": 1.2}, {"right": 1, "f-1": 1})


@pytest.mark.parametrize(
    ("condition", "passes"),
    [
        ("right >= 1", [1, 4]),
        ("reward >= 1", [0, 1, 3, 4]),
        ("right >= 1 and components.'f-1' >= 1", [4]),
        ("components.right == 1", [1, 4]),
        ("components.'f-1' >= 0.1", [0, 1, 3, 4]),  # as stored: float32
        ("not right >= 1", [0]),  # a missing value is neither
        ("right < 1 or reward > 1.5", [0, 4]),
    ],
)
def test_an_answer_passes_by_a_component_and_not_by_the_sum(condition: str, passes: list[int]):
    assert np.flatnonzero(passing(PARTS, condition)).tolist() == passes


def test_an_answer_without_a_score_never_passes():
    assert passing(answers(1.0, None, 0.0), "reward is null or reward >= 1").tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("rewards", "given", "section", "condition"),
    [
        ((0.0, 1.0, None), None, OTHERS, EXACT),
        ((0.0, 0.0), None, OTHERS, EXACT),
        ((0.0, 1.0, 0.1), None, OTHERS, None),  # a consolation
        ((0.0, 1.023), None, OTHERS, None),
        ((0.0, -1.0), None, OTHERS, None),
        ((0.0, 2.0), None, OTHERS, None),
        ((None, None), None, OTHERS, None),
        ((0.0, 1.0), None, RewardSection(function="characters"), None),  # by chance
        ((0.0, 1.0), None, SEVERAL, None),
        ((0.0, 1.0), None, RewardSection(), EXACT),
        ((0.0, 0.5), "reward >= 0.5", OTHERS, "reward >= 0.5"),
    ],
)
def test_without_a_condition_only_rewards_of_0_and_1_say_which_answers_pass(rewards, given, section, condition):
    assert condition_of(answers(*rewards), section, given) == condition


@pytest.mark.parametrize("condition", ["rigth >= 1", "Right >= 1", "components.right1 > 0", "f-1 >= 1"])
def test_a_component_that_no_answer_has_is_no_pass_rate_of_0(condition: str):
    with pytest.raises(
        InputError, match=r"evaluate\.pass = .* names .*, which the reward does not give; its comp.* f-1, r"
    ):
        passing(PARTS, condition)


@pytest.mark.parametrize(
    ("section", "condition", "words"),
    [
        (OTHERS, "right", "evaluate.pass: filter 'right', position 1, at 'right': it is a number"),
        (OTHERS, "", "evaluate.pass: filter '', position 1, at its end: a column or a value is missing"),
        (OTHERS, "right >= '1'", "it compares a number with a text"),
        (OTHERS, "right >= 1 extra", "the condition should end here"),
        (RewardSection(), "right >= 1", "names right, which the reward does not give; it has no components: compare"),
        (SEVERAL, "rigth >= 1", "names rigth, which the reward does not give; its components are right, f-1"),
        (SEVERAL, "f-1 >= 1", "written as components.'NAME'"),
    ],
)
def test_what_can_be_known_is_said_before_the_start(section: RewardSection, condition: str, words: str):
    with pytest.raises(InputError) as refused:
        check_passing(section, condition, "evaluate.pass")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("section", "condition"),
    [
        (OTHERS, None),
        (OTHERS, "right >= 1"),
        (SEVERAL, "right >= 1 or components.'f-1/deep' > 0"),
        (SEVERAL, "reward > 1"),
    ],
)
def test_what_may_be_right_is_not_refused(section: RewardSection, condition: str | None):
    check_passing(section, condition, "evaluate.pass")
