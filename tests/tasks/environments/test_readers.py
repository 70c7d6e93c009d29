"""From the text of an answer to its parts."""

import time

import pytest

from storage.errors import InputError, WorkerLost
from tasks.environments.calls import OPENED, by_tags
from tasks.environments.reading import ForeignReader
from tests.tasks.data.chat_model import chat_model

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_the_form_that_is_built_in():
    assert by_tags(f"<think>one</think>\n\nso {CALL}{CALL}", [ADD]) == ("so", "one", (("add", '{"a": 1}'),) * 2)
    assert by_tags(f"one</think>{CALL}", [ADD]) == ("", "one", (("add", '{"a": 1}'),))  # the prompt opened the block
    assert by_tags(CALL, []) == (CALL, None, ())
    for wrong in ("<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>", '<tool_call>{"a": 1}</tool_call>'):
        assert by_tags(wrong, [ADD]) == (wrong, None, ())


@pytest.mark.parametrize("repeated", ["\n", OPENED, "</tool_call>", f"{OPENED} "])
def test_an_answer_without_end_is_read_in_a_time_that_grows_with_its_length(repeated):
    def seconds(count):
        clock, text = time.process_time(), OPENED + repeated * count
        assert by_tags(text, [ADD]) == (text, None, ()) or repeated == "</tool_call>"
        return time.process_time() - clock

    assert min(seconds(1000) for _ in range(3)) < 100 * max(min(seconds(50) for _ in range(3)), 1e-4)


def test_a_process_of_parsers_that_has_ended_is_a_loss_of_ours_and_not_of_the_environment(monkeypatch):
    command = ("sh", "-c", """echo '{}'; read line; echo '{"content": "so", "reasoning": null, "calls": []}'""")
    monkeypatch.setattr("tasks.environments.reading.PARSER", command)
    with ForeignReader("", "hermes", "") as read:
        assert read("so", [ADD]) == ("so", None, ())
        for _ in range(2):  # before its end is known, and after
            with pytest.raises(WorkerLost, match="the next attempt starts a new one"):
                read("x" * (1 << 20), [ADD])


@pytest.mark.slow
def test_parsers_of_vllm(tmp_path):
    model = str(chat_model(tmp_path))
    with ForeignReader(model, "hermes", "") as read:
        assert read(f"so {CALL}", [ADD]) == ("so ", None, (("add", '{"a": 1}'),))
        assert read("so", [ADD]) == ("so", None, ())
        half = CALL.replace("1", '"\\ud800"')
        assert read(half, [ADD]) == (half, None, ())
        assert read(CALL, [{"type": "function"}]) == (CALL, None, ())  # the parser raises
        assert read(CALL, [ADD]).calls


@pytest.mark.full
def test_a_parser_that_vllm_does_not_have(tmp_path):
    with pytest.raises(InputError, match="no tool parser 'telepathy'"):
        ForeignReader(str(chat_model(tmp_path)), "telepathy", "")
