"""The calculator: its arithmetic, calls of both forms, and wrong ones, which are the policy's own failures."""

import asyncio

import pytest

from tasks.environments.calculator import calculated
from tasks.environments.playing import load_environment, play

RECORD = {"prompt": "Tom has 47 apples and finds 38.", "answer": "85"}


@pytest.mark.parametrize(
    ("expression", "value"),
    [("47+38", "85"), ("-(2+3)*4", "-20"), ("1/4", "0.25"), ("6/3", "2"), ("2*-3", "-6"), ("1e3", "1000")],
)
def test_it_calculates(expression, value):
    assert calculated(expression) == value


@pytest.mark.parametrize("bad", ["", "1/0", "2**9", "x", "True+1", "(" * 150, "1" * 201, "__import__('os')", "1e999"])
def test_what_is_no_arithmetic_is_an_error_in_words(bad):
    assert calculated(bad).startswith("error: ")


def played(arguments, *answers):
    said = iter(answers)
    return asyncio.run(play(load_environment("calculator", arguments), RECORD, 0, lambda _: next(said)))


HERMES = '<tool_call>{"name": "calculator", "arguments": {"expression": "47+38"}}</tool_call>'


@pytest.mark.parametrize(("arguments", "call"), [({}, HERMES), ({"call": "="}, "=47+38")])
def test_a_call_is_answered_and_the_last_number_counts(arguments, call):
    turns = played(arguments, call, "It is 85.")
    assert [turn.reward for turn in turns] == [0.0, 1.0]
    assert [(one["role"], one["content"]) for one in turns[1].observation] == [("tool", "85")]
    assert [turn.reward for turn in played(arguments, "It is 84.")] == [0.0]
    assert [turn.reward for turn in played(arguments, "none")] == [0.0]


@pytest.mark.parametrize(
    "call", ["<tool_call>85</tool_call>", "<tool_call>{</tool_call>", '<tool_call>{"a": 1}</tool_call>']
)
def test_a_wrong_call_is_told_so_and_the_conversation_goes_on(call):
    turns = played({}, call, "85")
    assert turns[1].observation[0]["content"].startswith("error: a call is")
    assert [turn.reward for turn in turns] == [0.0, 1.0]
