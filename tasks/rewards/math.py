"""Mathematical equality by math-verify."""

from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify  # slow to import: must not count against the first sample's deadline


def math_verify(record: Mapping[str, Any], response: str, *, field: str = "answer") -> float:
    """1.0 if the response's last expression is mathematically equal to the record's answer; else 0.0.

    math-verify's own time-outs are signal alarms, which work only in the main thread; they are off, and the
    deadline of the scoring process applies instead. Set `reward.processes` to at least 1.
    """
    gold = parse(str(record[field]), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    answer = parse(response, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return float(verify(gold, answer, timeout_seconds=None))
