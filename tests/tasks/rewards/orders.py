"""Scoring in processes, in short."""

from collections.abc import Sequence
from typing import Any

from tasks.rewards.pool import Response, ScoringOrder, score_in_processes
from tasks.rewards.resolve import find_reward
from tasks.rewards.sample import Score

HELPERS = "tests.tasks.rewards.misbehaving"
RECORD = {"answer": "42"}


def order(name: str, arguments: dict[str, Any] | None = None, **more: Any) -> ScoringOrder:
    given = {"weights": {}, "batch": False, "deadline_s": 20.0, "start_deadline_s": 60.0, **more}
    return ScoringOrder(find_reward(name), arguments or {}, **given)


def responses(texts: Sequence[str], record: dict[str, Any] = RECORD) -> list[Response]:
    return [Response(record, text, "p", number, 3, "stop", (7, number)) for number, text in enumerate(texts)]


def scores(
    given: ScoringOrder, texts: Sequence[str], record: dict[str, Any] = RECORD, processes: int = 1
) -> list[Score]:
    found = score_in_processes(given, responses(texts, record), processes).scores
    assert None not in found
    return [score for score in found if score is not None]
