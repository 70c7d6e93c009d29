"""Functions as tools: their definitions, calls that are wrong, and whose failure an error is."""

import asyncio
import json
from pathlib import Path

import pytest

from storage.errors import InputError
from tasks.config.reward import EnvironmentSection
from tasks.environments.calls import by_tags
from tasks.environments.conversation import Limits, Player, Task
from tasks.environments.hosting import Host
from tasks.environments.playing import load_environment, play
from tasks.environments.rendering import Renderer
from tests.tasks.endpoint.talking import HOW, Policy, codec_of

FILE = Path(__file__).parent / "offered.py"
RECORD = {"id": "a", "prompt": "How much?", "answer": "12 m"}


def call(tool, **arguments):
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def test_a_definition_follows_from_types_and_docstring_or_is_given():
    area, look_up, sized = load_environment(f"{FILE}:TOOLS").tools
    assert area["function"] == {
        "name": "area",
        "description": "Multiplies two sides.",
        "parameters": {
            "type": "object",
            "properties": {
                "width": {"type": "integer", "description": "of the rectangle"},
                "height": {"type": "integer"},
                "unit": {"type": "string", "enum": ["m", "cm"], "description": "of length"},
            },
            "required": ["width"],
        },
    }
    assert look_up["function"]["parameters"]["required"] == ["name"]
    assert sized["type"] == "function"
    assert sized["function"]["name"] == "sized"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("area", width=3, height="4"), ["12 m"]),
        (call("area", width=3) + call("look_up", name="Ann"), ["3 m", '{"number": 7}']),
        (call("sized", b=1, a=2), ['["a", "b"]']),
        (call("look_up", name="Tom"), ["error: nobody is called Tom"]),
        (call("area", height=2), ["error: width: Field required"]),
        (call("area", width=1, depth=2), ["error: depth: Extra inputs are not permitted"]),
        (call("area", width=1, unit="km"), ["error: unit: Input should be 'm' or 'cm'"]),
        (call("volume"), ["error: there is no tool 'volume'"]),
        ("<tool_call>{</tool_call>", ['error: a call is {"name": NAME, "arguments": {NAME: VALUE}} as JSON']),
    ],
)
def test_a_call_is_answered_whether_it_is_right_or_wrong(said, told):
    answers = iter([said, "12 m"])
    first, last = asyncio.run(play(load_environment(f"{FILE}:TOOLS"), RECORD, 0, lambda _: next(answers)))
    assert [one["content"] for one in last.observation] == told
    assert (first.reward, last.reward) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("UNTYPED", {}, r"sized cannot be a tool: its parameter \*\*given cannot be given by name\. Give a function"),
        ("TOOLS", {"reward": "taste"}, "reward 'taste' is unknown"),
        ("TOOLS", {"colour": 3}, "reward = 'exact_match' cannot be called with {'colour': 3}"),
    ],
)
def test_what_is_no_tool_is_refused(function, arguments, said):
    with pytest.raises(InputError, match=said):
        load_environment(f"{FILE}:{function}", arguments)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Processes for tools that are never noted, and for those that note their calls in a file."""
    log = tmp_path_factory.mktemp("log") / "log"
    logged = EnvironmentSection(function=f"{FILE}:Logged", arguments={"log": str(log)})
    with Host(EnvironmentSection(function=f"{FILE}:TOOLS")) as plain, Host(logged) as noted:
        yield plain, noted, log


def conversation(folder, host, says, past=(), turns=4, retries=1, seconds=60.0):
    """A conversation with a policy that says what it is told to: what came of it, its events, and the policy."""
    codec, events = codec_of(folder), []
    policy = Policy(codec, says)

    async def note(event):
        events.append(event)

    limits = Limits(turns=turns, tokens=None, seconds=seconds, retries=retries, context=4096)
    player = Player(host, policy, HOW, codec, Renderer(codec), limits, by_tags)
    return asyncio.run(player.play(Task(0, "a", 0, RECORD, [], 5, 6), past, note)), events, policy


def odd(folder, kind, past=(), **arguments):
    section = EnvironmentSection(function=f"{FILE.parent}/sums.py:{kind}", arguments=arguments)
    with Host(section) as host:
        return conversation(folder, host, lambda *_: "2", past, retries=0)


@pytest.mark.parametrize(
    ("how", "told"),
    [("tools", "Odd.tools is ['calculator']: expected a list"), ("surrogate", "surrogates not allowed")],
)
def test_what_cannot_be_shown_is_a_failure_of_one_conversation(tmp_path, how, told):
    played, _, _ = odd(tmp_path, "Odd", how=how)
    assert played.kept.score.failure.reason == "exception"
    assert told in played.kept.score.failure.detail


def test_an_environment_that_speaks_as_the_policy_takes_none_of_its_turns(tmp_path):
    played, _, _ = odd(tmp_path, "Odd", how="assistant")
    assert len(played.kept.score.rewards) == 3
    assert [turn["role"] for turn in played.trajectory.turns] == ["assistant", "environment"] * 2 + ["assistant"]


def test_a_conversation_goes_on_only_with_an_environment_that_begins_as_it_did(tmp_path):
    whole, events, _ = odd(tmp_path, "Unseeded")
    assert whole.kept.score.failure is None
    other, _, _ = odd(tmp_path, "Unseeded", events[:3])
    assert "its reset gave another observation than at its beginning" in other.kept.score.failure.detail
    assert other.kept.score.score.reward is None


def test_the_template_shows_tools_and_results_and_a_row_records_the_calls(tmp_path, hosts):
    first = call("area", width=3, height=4)
    played, _, policy = conversation(tmp_path, hosts[0], lambda seen, _: "12 m" if "12 m" in seen else first)
    assert played.kept.score.rewards == (0.0, 1.0)
    turns = played.trajectory.turns
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant"]
    assert json.loads(turns[0]["calls"]) == [{"name": "area", "arguments": '{"width": 3, "height": 4}'}]
    assert json.loads(turns[1]["results"]) == ["12 m"]
    shown = policy.codec.backend.decode([policy.asked[-1][0]])[0]
    assert '"Multiplies two sides."' in shown
    assert shown.endswith(f"{first}<|end|>\n<|tool|>12 m<|end|>\n<|assistant|>")


def test_half_of_a_surrogate_pair_is_told_to_the_policy_that_wrote_it(tmp_path, hosts):
    half = call("look_up", name="x").replace('"x"', '"\\ud800"')
    assert by_tags(half, [{}]).calls == ()
    played, _, _ = conversation(tmp_path, hosts[0], lambda *_: half, retries=0)
    assert played.kept.score.failure is None


def test_an_error_that_no_tool_has_declared_is_a_failure_and_no_reward(tmp_path, hosts):
    played, events, _ = conversation(tmp_path, hosts[0], lambda *_: call("look_up", name="broken"))
    assert played.kept.score.failure.reason == "exception"
    assert "ConnectionError: the table is gone (offered.py, line " in played.kept.score.failure.detail
    assert played.kept.score.score.reward is None
    assert [event.kind for event in events] == ["begun", "called", "failed", "called", "failed"]


def test_a_call_whose_result_is_recorded_is_not_made_again(tmp_path, hosts):
    _, host, log = hosts

    def says(seen, _):
        return "done" if "<|tool|>two" in seen else call("noted", what="two" if "<|tool|>one" in seen else "one")

    whole, events, _ = conversation(tmp_path, host, says)
    assert whole.kept.score.rewards == (0.0, 0.0, 4.0)
    assert log.read_text() == "one\ntwo\n"
    again, _, _ = conversation(tmp_path, host, says, events[:3])
    assert log.read_text() == "one\ntwo\ntwo\n"
    assert (
        again.trajectory.columns()["response_tokens"].tolist() == whole.trajectory.columns()["response_tokens"].tolist()
    )
    unknown, failed, _ = conversation(tmp_path, host, says, events[:4])
    assert [event.kind for event in failed] == ["failed", "called", "told", "called", "told"]
    assert "the outcome is not known" in failed[0].detail
    assert unknown.kept.score.rewards == whole.kept.score.rewards
