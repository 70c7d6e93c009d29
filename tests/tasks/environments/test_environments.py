"""The protocol of environments: a game of several turns, and the faults of a user's code."""

import asyncio

import pytest

from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT
from tasks.environments.playing import Turn, load_environment, play

EXAMPLE = f"{PROJECT_ROOT}/infra/examples/environment.py:GuessTheNumber"


def halving(highest: int):
    """The oracle: halves the remaining range."""
    low, high = 1, highest
    guess = 0

    def act(observation) -> str:
        nonlocal low, high, guess
        said = observation[-1]["content"]
        if said == "Higher.":
            low = guess + 1
        elif said == "Lower.":
            high = guess - 1
        guess = (low + high) // 2
        return f"It is {guess}."

    return act


@pytest.mark.parametrize("seed", range(20))
def test_the_oracle_always_wins_the_example(seed):
    turns = asyncio.run(play(load_environment(EXAMPLE), {}, seed, halving(100)))
    assert len(turns) <= 7
    assert [turn.reward for turn in turns] == [0.0] * (len(turns) - 1) + [1.0]


def test_a_game_is_the_same_again_and_ends_when_the_turns_are_over():
    game = load_environment(EXAMPLE, {"highest": 3, "turns": 2})
    plays = [asyncio.run(play(game, {"prompt": "Well?"}, 5, lambda _: "none")) for _ in range(2)]
    first = [{"role": "user", "content": "Well?"}]
    assert plays[0] == plays[1] == [
        Turn(first, "none", 0.0),
        Turn([{"role": "user", "content": "That is no number."}], "none", 0.0),
    ]  # fmt: skip


GOOD = """
class Mine:
    async def reset(self, record, seed):
        return "hello"
    async def step(self, action):
        return None, 1.0, True
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no')", r"ValueError: no \(mine\.py, line 1\)"),
        ("Mine = 3", "cannot be made: TypeError"),
        ("raise SystemExit(3)", r"cannot be made: SystemExit: 3 \(mine.py, line 1\)"),
        ("class Other: pass", "has no 'Mine'"),
        ("class Mine: pass", r"has no method 'reset' \(mine.py\): expected `async def reset\(self, record, seed\)`"),
        (GOOD.replace("async def step", "def step"), r"Mine\.step \(mine\.py:5\) is not async"),
        (GOOD.replace("record, seed", "record"), r"Mine\.reset \(mine\.py:3\) has the parameters \(self, record\)"),
    ],
)
def test_what_is_no_environment_is_refused_when_it_is_loaded(tmp_path, text, said):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError, match=said):
        load_environment(f"{tmp_path}/mine.py:Mine")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('return "hello"', "return 3", r"Mine\.reset \(mine\.py:3\) gave the observation 3: expected a text"),
        ('return "hello"', "return [{'role': 'user'}]", "gave the observation .*: expected a text, or messages"),
        ('return "hello"', "return 1 / 0", r"raised ZeroDivisionError: division by zero \(mine\.py, line 4\)"),
        ("None, 1.0, True", "1.0, True", r"Mine\.step \(mine\.py:5\) returned \(1\.0, True\): expected"),
        ("None, 1.0, True", "None, 1.0, 'yes'", "returned done = 'yes': expected True or False"),
        (
            "None, 1.0, True",
            "None, float('nan'), True",
            "returned the reward nan: expected a finite int or float, or None",
        ),
        ("None, 1.0, True", "None, 0.0, False", "gave the observation None"),
        ("None, 1.0, True", "'again', 0.0, False", "is not done after 64 turns"),
    ],
)
def test_what_an_environment_does_wrong_is_named_with_its_line(tmp_path, old, new, said):
    (tmp_path / "mine.py").write_text(GOOD.replace(old, new))
    mine = load_environment(f"{tmp_path}/mine.py:Mine")
    with pytest.raises(InputError, match=said):
        asyncio.run(play(mine, {}, 0, lambda _: "x"))
