"""Trial calls of the reward on real records before a run: a failure is found in a second, not after minutes."""

import json

import pyarrow as pa
import pytest

from storage.errors import InputError
from storage.schema import PROMPTS
from tasks.config.reward import RewardSection
from tasks.rewards.scoring import notices
from tasks.rewards.trying import WRONG, blind, call_reward, check_golds, check_reward


class Codec:
    """A codec of one token a character."""

    def encode_batch(self, texts):
        return [[ord(sign) for sign in text] for text in texts]

    def closed(self, tokens):
        return [*tokens, 0]


OWN = f"""
def right(record, response):
    return float(response == record["answer"])

def parts(record, response, sample):
    if response == {WRONG!r} and len(sample.tokens) == len(response) + 1:
        return {{"right": 0, "brief": 0}}
    return {{"right": response == record["answer"], "brief": 1}}

def of_another_field(record, response):
    return record["solution"] in response

def deaf(record, response):
    return 0.25

def fussy(record, response):
    return float(response)

def batch(records, responses, samples):
    return [sample.prompt_id == "p0" for sample in samples]
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name, **more: RewardSection.model_validate({"function": f"{tmp_path}/own.py:{name}", **more})


def prompts(records, answers=None):
    rows = [
        {"prompt_id": f"p{number}", "answer": answer, "record": json.dumps(record)}
        for number, (record, answer) in enumerate(zip(records, answers or [None] * len(records), strict=True))
    ]
    columns = ["prompt_id", "answer", "record"]
    return pa.table({name: pa.array([row[name] for row in rows], PROMPTS.field(name).type) for name in columns})


RECORDS = [{"answer": str(number)} for number in range(9)]


def rewards(section, table):
    return [(call.prompt_id, call.own, call.score.reward) for call in call_reward(section, table, Codec())]


def test_a_few_records_are_tried_with_their_own_answer_and_a_wrong_one(own):
    expected = [(name, is_own, float(is_own)) for name in ("p0", "p4", "p8") for is_own in (True, False)]
    assert rewards(own("right"), prompts(RECORDS)) == expected
    assert rewards(RewardSection(), prompts(RECORDS)) == expected


def test_a_rendered_answer_goes_before_the_records_and_no_answer_is_none(own):
    assert rewards(RewardSection(function="regex", arguments={"pattern": ".*"}), prompts([{"answer": "1"}], ["2"])) == [
        ("p0", True, 0.0),
        ("p0", False, 0.0),
    ]
    assert rewards(own("deaf"), prompts([{"question": "why"}])) == [("p0", False, 0.25)]


def test_components_and_samples_are_as_in_the_run(own):
    found = call_reward(own("parts", weights={"brief": 0.5}), prompts(RECORDS[:1]), Codec())
    assert [call.score.reward for call in found] == [1.5, 0.0]
    assert rewards(own("batch", batch=True), prompts(RECORDS[:2])) == [
        ("p0", True, 1.0), ("p0", False, 1.0), ("p1", True, 0.0), ("p1", False, 0.0)
    ]  # fmt: skip


REFUSED = {
    "a misspelt component": (
        "parts",
        {"weights": {"rihgt": 2.0}},
        ["6 of 6 calls", "prompt 'p0', its own answer '0': no_number", "returned right, brief, but there is a weight"],
    ),
    "a weight without components": ("right", {"weights": {"right": 1.0}}, ["weights need a mapping"]),
    "a field that is not there": ("of_another_field", {}, ["KeyError: 'solution' (own.py, line 11)", "6 of 6"]),
    "wrong answers have no score": ("fussy", {}, ["3 of 6 calls", "a wrong answer 'I do not know.': exception"]),
    "a component of several": (
        "right",
        {"several": True},
        ["reward.functions (a): function 'own.py:parts' and reward.functions (b)", "a: returned right, brief"],
    ),
}


@pytest.mark.parametrize(("name", "more", "words"), REFUSED.values(), ids=REFUSED)
def test_a_reward_that_cannot_score_is_refused_and_each_repair_works(own, name, more, words):
    one = own("right").function.replace(":right", ":parts")
    several = {"functions": [{"name": "a", "function": one, "weights": {"c": 1.0}}, {"name": "b", "function": one}]}
    section = RewardSection.model_validate(several) if "several" in more else own(name, **more)
    with pytest.raises(InputError) as refused:
        call_reward(section, prompts(RECORDS), Codec())
    said = str(refused.value)
    assert all(word in said for word in words), said
    assert ("reward.max_failures" in said) == (name == "fussy")  # some of them have a score
    assert said.endswith("or leave these calls out with reward.try = false")
    repaired = section.model_dump(mode="json")
    assert call_reward(RewardSection.model_validate({**repaired, "try": False}), prompts(RECORDS), Codec()) == []
    right = own("right" if name == "of_another_field" else "deaf" if name == "fussy" else "parts")
    assert call_reward(right, prompts(RECORDS), Codec())


def test_failures_that_are_allowed_are_shown_and_not_refused(own):
    found = call_reward(own("fussy", max_failures=0.5), prompts(RECORDS), Codec())
    assert [call.score.reason for call in found] == [None, "exception"] * 3


def test_leaving_it_out_is_said(own):
    assert notices(RewardSection.model_validate({"try": False})) == [
        "reward.try is false: the reward is not called on records before the run"
    ]


@pytest.mark.parametrize(("name", "count"), [("deaf", 1), ("right", 0)])
def test_a_reward_that_does_not_know_right_from_wrong_is_noted(own, name, count):
    assert len(blind(call_reward(own(name), prompts(RECORDS), Codec()))) == count


GOLDS = [{"answer": r"\frac{1}{2}"}, {"answer": "7"}, {"answer": r"\frac{1}{"}, {"answer": ""}, {"question": "?"}]


@pytest.mark.slow
def test_golds_that_cannot_be_read_are_named_with_their_records():
    with pytest.raises(InputError) as refused:
        check_golds(RewardSection(function="math_verify"), [prompts(GOLDS[:2]), prompts(GOLDS)])
    said = str(refused.value)
    assert "reward.function 'math_verify' cannot read the answers of 3 records" in said
    assert r"prompt 'p2': ValueError: answer '\\frac{1}{' has a brace that is not closed" in said
    assert "prompt 'p3': ValueError: answer '' is empty" in said
    assert "prompt 'p4': KeyError: 'answer'" in said


@pytest.mark.slow
def test_golds_that_can_be_read_and_those_of_other_rewards_are_no_matter():
    check_golds(RewardSection(function="math_verify"), [prompts(GOLDS[:2])])
    check_golds(RewardSection(function="math_verify", arguments={"field": "key"}), [prompts([{"key": 1}])])
    check_golds(RewardSection(), [prompts(GOLDS)])


@pytest.mark.parametrize("key", ["deadline_s", "start_deadline_s"])
def test_a_deadline_that_nothing_keeps_is_refused(key):
    check_reward(RewardSection(**{key: 3.0, "processes": 1}))
    with pytest.raises(InputError, match=rf"reward\.{key} has no effect with functions that are scored in the calling"):
        check_reward(RewardSection(**{key: 3.0}))


def test_tests_of_programs_that_cannot_be_read_are_named_with_their_records():
    records = [{"tests": "assert f(1)"}, {"tests": "assert ("}, {"answer": "1"}]
    check_golds(RewardSection(function="code_tests"), [prompts(records[:1])])
    with pytest.raises(InputError) as refused:
        check_golds(RewardSection(function="code_tests"), [prompts(records)])
    said = str(refused.value)
    assert "'code_tests' cannot read the tests of 2 records" in said
    assert "prompt 'p1': SyntaxError" in said and "prompt 'p2': KeyError: 'tests'" in said
