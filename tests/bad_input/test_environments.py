"""Environments that cannot work: the exit code, the message, and proof that nothing heavy was imported for it."""

import pytest

from tests.bad_input.conftest import check_refused
from tests.bad_input.test_command import CONFIG

FILES = {
    "good.py": """
class Game:
    def __init__(self, highest=10): pass
    async def reset(self, record, seed): return "hello"
    async def step(self, action): return None, 1.0, True
async def drive(base_url, api_key, record, seed, *, rounds=1): return 1.0
""",
    "wrong.py": """
LIMIT = 3
def plain(base_url, api_key, record, seed): return 1.0
async def other(url, record): return 1.0
class Mute:
    async def reset(self, record, seed): return "hello"
class Slow:
    async def reset(self, record, seed): return "hello"
    def step(self, action): return None, 1.0, True
class Closed:
    def __init__(self): raise OSError("no key in the safe")
""",
    "dies.py": "import os\nos._exit(7)\n",
}


def of(function: str, *more: str) -> list[str]:
    return [f"environment.function={function}", *more]


CASES = {
    "no such file": (of("missing.py:Game"), ["there is no file missing.py in ", "Give the path"]),
    "no such class": (of("good.py:Play"), ["good.py has no 'Play'"]),
    "no such entry point": (of("calculater"), ["is unknown", "calculator"]),
    "no class": (of("wrong.py:LIMIT"), ["wrong.py:LIMIT", "not"]),
    "no step": (of("wrong.py:Mute"), ["Mute has no method 'step'", "async def step(self, action)"]),
    "not async": (of("wrong.py:Slow"), ["Slow.step (wrong.py:", "is not async", "async def step(self, action)"]),
    "another signature": (of("wrong.py:other"), ["expected `async def other(base_url, api_key, record, seed)`"]),
    "made by an error": (of("wrong.py:Closed"), ["cannot be made: OSError: no key in the safe (wrong.py, line "]),
    "an argument it does not take": (of("good.py:Game", "environment.arguments.lowest=1"), ["lowest"]),
    "a process that ends": (of("dies.py:Game"), ["its process ended while it was imported"]),
    "a literal secret": (of("good.py:Game", "environment.arguments.api_key=sk-4711"), ["looks like a secret", "env:"]),
    "clients of a class": (of("good.py:Game", "environment.sampling=refuse"), ["is for clients of a function `drive`"]),
    "no turns": (of("good.py:Game", "environment.turns=0"), ["environment.turns", "greater than or equal to 1"]),
    "an unknown key": (
        of("good.py:Game", "environment.turn=2"),
        ["environment.turn: unknown key", "environment.turns"],
    ),
    "a reward beside it": (of("good.py:Game", "reward.function=regex"), ["reward.function", "which gives the rewards"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "words"), CASES.values(), ids=CASES)
def test_a_bad_environment_is_refused_before_anything_heavy(command, tmp_path, settings, words):
    check_refused(command, tmp_path, {"run.toml": CONFIG, **FILES}, settings, words)
