"""A scoring process: JSON lines in, JSON lines out. Started by tasks.rewards.pool."""

import json
import os
import sys
from typing import Any, TextIO

from tasks.config.environment import without_secrets
from tasks.rewards.resolve import Reward, resolve_reward


def main() -> None:
    """Read the function's name and arguments, then one sample a line; answer each as soon as it is scored."""
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
    """Score one sample; what the function raises becomes a recorded fact, never a silent 0."""
    try:
        return {"status": "ok", "reward": float(function(record, response)), "detail": ""}
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and it is recorded
        detail = without_secrets(f"{type(error).__name__}: {error}")  # it is stored
        return {"status": "error", "reward": None, "detail": detail}


def _answer(stream: TextIO, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
