"""Tools of an MCP server, in the process of an environment, with the real package on both sides."""

import json
import sys
from pathlib import Path

import pytest

from storage.errors import InputError
from tasks.config.reward import EnvironmentSection
from tasks.environments.hosting import Host
from tasks.environments.playing import load_environment
from tests.tasks.environments.test_tools import call, conversation

SERVER = [sys.executable, str(Path(__file__).parent / "mcp_server.py"), "first"]


@pytest.mark.slow
def test_a_server_is_started_for_each_conversation_and_its_errors_are_told_but_its_end_is_a_failure(tmp_path):
    wrong = (call("note", text="no"), call("note"), call("lost"))
    answers = (call("note", text="a", times=2), *wrong, "12 m")

    def says(seen, _):
        return answers[seen.count("<|tool|>")]

    section = EnvironmentSection(function="mcp", arguments={"command": SERVER})
    with Host(section) as host:
        played, _, policy = conversation(tmp_path, host, says, turns=9)
        died, events, _ = conversation(tmp_path, host, lambda *_: call("note", text="die"), retries=0)
        endless, _, _ = conversation(tmp_path, host, lambda *_: call("note", text="a", times=1 << 20), retries=0)
    results = [json.loads(turn["results"])[0] for turn in played.trajectory.turns if turn["role"] == "tool"]
    assert results[0] == "first,a,a"
    assert "that is not kept" in results[1]
    assert results[2].startswith("error: ")
    assert results[3] == "error: there is no tool 'lost'"
    assert played.kept.score.rewards == (0.0, 0.0, 0.0, 0.0, 1.0)
    assert '"Keeps a text."' in policy.codec.backend.decode([policy.asked[0][0]])[0]
    assert "Connection closed" in died.kept.score.failure.detail
    assert "bytes at once; 1048576 are possible" in endless.kept.score.failure.detail
    assert [event.kind for event in events] == ["begun", "called", "failed"]
    assert not any(event.goes_on for event in events)  # the server may have remembered something


ANSWERS = """
import json, sys
for line in sys.stdin:
    if "id" in (asked := json.loads(line)):
        print({}, flush=True)
"""
BAD = {
    "ends at once": ("raise SystemExit(3)", "exception", "Connection closed"),
    "no JSON": (ANSWERS.replace("{}", "'\\0 no JSON'"), "timeout", "its beginning of prompt 'a', sample 0 did not end"),
    "another form": (
        ANSWERS.replace("{}", "json.dumps({'jsonrpc': '2.0', 'id': asked['id'], 'result': {'none': 1}})"),
        "exception",
        "validation error",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_a_server_that_does_not_do_its_part_is_a_failure_and_no_number(tmp_path, name):
    text, reason, said = BAD[name]
    section = EnvironmentSection(function="mcp", arguments={"command": [sys.executable, "-c", text]})
    with Host(section) as host:  # a server that answers never is given a second; the others as long as they take
        seconds = 1.0 if reason == "timeout" else 60.0
        played, events, _ = conversation(tmp_path, host, lambda *_: "12 m", retries=0, seconds=seconds)
    assert (played.kept.score.failure.reason, played.kept.score.rewards) == (reason, ())
    assert said in played.kept.score.failure.detail
    assert [event.kind for event in events] == ["failed"]


def test_a_command_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"command = \['no-such-server'\] cannot be run: give a program on PATH"):
        load_environment("mcp", {"command": ["no-such-server"]})
