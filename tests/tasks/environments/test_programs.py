"""Programs in several turns: what failed is told, and hostile ones are failures of the policy that leave nothing."""

import asyncio
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.errors import InputError
from tasks.environments import programs
from tasks.environments.playing import load_environment, play
from tests.tasks.rewards.test_sandbox import HOSTILE

NAME = "tasks.environments.programs:Programs"
RECORD = {"prompt": "Write double(x).", "tests": ["assert double(2) == 4", "assert double(0) == 0"]}
RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"


def played(record, *answers, **arguments):
    said = iter(answers)
    return asyncio.run(play(load_environment(NAME, arguments), record, 0, lambda _: next(said)))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("def double(x): return x", "AssertionError"),
        ("def twice(x): return 2 * x", "NameError: name 'double' is not defined"),
        ("import time; time.sleep(600)", "it takes too long"),
        ("while True: print('a' * 1000)", "it writes too much"),
        ("import sys; sys.exit(0)", "its output is not the expected one"),
    ],
)
def test_the_policy_is_told_what_went_wrong_and_may_try_again(wrong, told):
    turns = played(RECORD, wrong, RIGHT, seconds=8.0)
    assert [turn.reward for turn in turns] == [0.0, 1.0]
    assert told in turns[1].observation
    assert "double(2)" not in turns[1].observation


def test_inputs_and_outputs_are_tests_too_and_tries_are_limited():
    record = {"prompt": "Double the input.", "tests": [{"input": "4", "output": "8"}]}
    assert [turn.reward for turn in played(record, "print(2 * int(input()))")] == [1.0]
    assert [turn.reward for turn in played(record, "print(1)", "print(2)", answers=2)] == [0.0, 0.0]


@pytest.mark.slow
def test_hostile_programs_have_no_reward_and_touch_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "1")
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = {"PORT": str(server.getsockname()[1]), "PARENT": str(os.getpid()), "FOLDER": str(tmp_path)}

        def reward(program):
            for word, value in words.items():
                program = program.replace(word, value)
            text = f"{program}\ndef double(x): return 2 * x"  # right, if it were reached
            return sum(turn.reward for turn in played(RECORD, text, answers=1, seconds=4.0, memory_mb=256))

        with ThreadPoolExecutor(2) as pool:
            found = dict(zip(HOSTILE, pool.map(reward, HOSTILE.values()), strict=True))
    assert {name for name, value in found.items() if value} == set()
    assert list(tmp_path.iterdir()) == [tmp_path / "secret"]


def test_without_a_sandbox_it_is_refused_before_anything_runs(monkeypatch):
    programs._checked.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="bubblewrap is not installed"):
        load_environment(NAME)


def test_a_record_without_tests_is_a_failure_with_its_reason():
    with pytest.raises(InputError, match="raised KeyError: 'tests'"):
        played({"prompt": "p"}, RIGHT)
