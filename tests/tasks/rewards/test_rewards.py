import re

import numpy as np
import pyarrow as pa
import pytest

from storage.errors import InputError, StageFailed
from tasks.config.reward import RewardSection
from tasks.rewards.match import exact_match, regex
from tasks.rewards.pool import Score, ScoringOrder, score_in_processes
from tasks.rewards.resolve import resolve_reward
from tasks.stages.reward import score_samples

HELPERS = "tests.tasks.rewards_for_tests"
RECORD = {"answer": "42"}


@pytest.mark.parametrize(("response", "score"), [("42", 1.0), (" 42\n", 1.0), ("43", 0.0), ("42 ", 1.0), ("", 0.0)])
def test_exact_match(response, score):
    assert exact_match(RECORD, response) == score


@pytest.mark.parametrize(
    ("pattern", "response", "score"),
    [
        ("[0-9]+", "first 7, then 42", 1.0),
        (r"#### (\d+)", "42 #### 41", 0.0),
        (r"#### (\d+)", "#### 42", 1.0),
        ("x", "42", 0.0),
    ],
)
def test_regex_takes_the_last_match(pattern, response, score):
    assert regex(RECORD, response, pattern=pattern) == score


def test_math_verify_in_processes_knows_equal_expressions():
    samples = [({"answer": r"$\frac{1}{2}$"}, text) for text in ("$0.5$", r"the answer is $\frac{2}{4}$", "$0.6$")]
    scores = score_in_processes(ScoringOrder("math_verify", {}, 30.0), samples, processes=1)
    assert [score.status for score in scores] == ["ok"] * 3
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_crash_and_an_exception_are_recorded_for_their_sample_alone(processes):
    responses = ["fine", "raise", "die", "fine"]
    order = ScoringOrder(f"{HELPERS}:crashing", {}, 20.0)
    scores = score_in_processes(order, [(RECORD, text) for text in responses], processes)
    assert [score.reward for score in scores] == [0.5, None, None, 0.5]
    assert [score.status for score in scores] == ["ok", "error", "error", "ok"]
    assert "no number in it" in scores[1].detail
    assert "code 3" in scores[2].detail


def test_a_hanging_sample_times_out_and_the_others_are_scored():
    order = ScoringOrder(f"{HELPERS}:sleepy", {}, 1.0)
    scores = score_in_processes(order, [(RECORD, text) for text in ("a", "hang", "b")], processes=1)
    assert [score.status for score in scores] == ["ok", "timeout", "ok"]
    assert scores[1].reward is None


def test_scoring_in_the_calling_process_records_exceptions_too():
    section = RewardSection(function=f"{HELPERS}:crashing", processes=0)
    scores = score_samples(section, [(RECORD, "raise"), (RECORD, "fine")])
    assert [(score.status, score.reward) for score in scores] == [("error", None), ("ok", 0.5)]


NO_REWARD = {
    "nan": "nan, which is not finite",
    "infinity": "-inf, which is not finite",
    "numpy": r"np.float32\(nan\), which is not finite",
    "too large": r"3.5e\+38, which is not finite as float32",
    "huge": "OverflowError",
    "text": "'0.5', which is not a number",
    "nothing": "TypeError: .*NoneType",
    "list": "TypeError: .*list",
    "complex": "TypeError: .*complex",
}
REWARDS = {"integer": 1.0, "truth": 1.0, "fraction": 0.25, "half": 0.5, "largest": -float(np.finfo(np.float32).max)}


@pytest.mark.parametrize("processes", [0, 2])
def test_what_is_no_finite_number_is_an_error_and_no_reward(processes):
    section = RewardSection(function=f"{HELPERS}:returning", processes=processes)
    asked = [*NO_REWARD, *REWARDS]
    scores = dict(zip(asked, score_samples(section, [(RECORD, name) for name in asked]), strict=True))
    for name, detail in NO_REWARD.items():
        assert (scores[name].status, scores[name].reward) == ("error", None)
        assert re.search(detail, scores[name].detail), name
    assert {name: scores[name] for name in REWARDS} == {name: Score(value, "ok", "") for name, value in REWARDS.items()}
    stored = pa.array([score.reward for score in scores.values()], pa.float32())
    assert np.isfinite(stored.drop_null().to_numpy()).all()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_message_that_is_no_text_can_be_stored_too(processes):
    section = RewardSection(function=f"{HELPERS}:complaining", processes=processes)
    (score,) = score_samples(section, [(RECORD, "this")])
    assert pa.array([score.detail], pa.string())[0].as_py() == "ValueError: cannot read this\\udc80"


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("exact_matsch", "is unknown"),
        ("no.such.module:f", "cannot be imported"),
        (f"{HELPERS}:absent", "has no 'absent'"),
        (f"{HELPERS}:NOT_A_FUNCTION", "is a int"),
    ],
)
def test_a_reward_that_cannot_be_found(name, fact):
    with pytest.raises(InputError, match=fact):
        resolve_reward(name, {})


def test_a_scoring_process_that_cannot_start_fails_the_stage():
    with pytest.raises(StageFailed, match="did not start"):
        score_in_processes(ScoringOrder("no.such.module:f", {}, 5.0), [(RECORD, "x")], processes=1)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_secret_is_read_from_the_environment_by_the_process_that_scores(monkeypatch, processes):
    monkeypatch.setenv("RATCHET_TEST_KEY", "sk-4711")
    arguments = {"api_key": "env:RATCHET_TEST_KEY", "headers": {"Authorization": "env:RATCHET_TEST_KEY"}}
    section = RewardSection(function=f"{HELPERS}:judged", arguments=arguments, processes=processes, deadline_s=20)
    scores = score_samples(section, [({"key": "sk-4711"}, text) for text in ("fine", "raise")])
    assert [score.reward for score in scores] == [1.0, None]
    assert "401 for *** with ***" in scores[1].detail, "what a function raises is stored"
    assert section.arguments == arguments


def test_a_secret_that_is_not_set_is_named_before_anything_is_scored(monkeypatch):
    monkeypatch.delenv("RATCHET_TEST_KEY", raising=False)
    with pytest.raises(InputError, match="RATCHET_TEST_KEY is not set"):
        resolve_reward(f"{HELPERS}:judged", {"api_key": "env:RATCHET_TEST_KEY", "headers": {}})
