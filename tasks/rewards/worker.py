"""A scoring process: JSON lines in, JSON lines out. Started by tasks.rewards.pool."""

import json
import math
import os
import reprlib
import sys
from typing import Any, TextIO

from tasks.config.environment import without_secrets
from tasks.rewards.resolve import Reward, resolve_reward

_LARGEST = (2 - 2**-23) * 2.0**127  # of float32


def main() -> None:
    """Read the function's name and arguments, then one sample per line; answer each as soon as it is scored."""
    # what the function prints must not mix with the answers
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    order = json.loads(sys.stdin.readline())
    function = resolve_reward(order["function"], order["arguments"])
    _answer(answers, {"status": "ready", "reward": None, "detail": ""})
    for line in sys.stdin:
        sample = json.loads(line)
        _answer(answers, score(function, sample["record"], sample["response"]))


def score(function: Reward, record: dict[str, Any], response: str) -> dict[str, Any]:
    """Score one sample; what the function raises or returns instead of a number is recorded, never a silent 0."""
    try:
        return {"status": "ok", "reward": finite(function(record, response)), "detail": ""}
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and it is recorded
        # stored, so it must contain no secret and nothing that UTF-8 cannot encode
        detail = without_secrets(f"{type(error).__name__}: {error}").encode(errors="backslashreplace").decode()
        return {"status": "error", "reward": None, "detail": detail}


def finite(value: object) -> float:
    """`value` as a number that the reward table can hold.

    Raises:
        TypeError, ValueError: it is not a number, or not finite as float32.
    """
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"the reward function returned {reprlib.repr(value)}, which is not a number")
    number = float(value)  # pyright: ignore[reportArgumentType] - raises for anything that is not a number
    if not math.isfinite(number) or abs(number) > _LARGEST:
        raise ValueError(f"the reward function returned {reprlib.repr(value)}, which is not finite as float32")
    return number


def _answer(stream: TextIO, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
