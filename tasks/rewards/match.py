"""Rewards by comparison of strings."""

import re
from collections.abc import Mapping
from typing import Any


def exact_match(record: Mapping[str, Any], response: str, *, field: str = "answer") -> float:
    """1.0 if the response, without surrounding white space, is the record's answer; else 0.0."""
    return float(response.strip() == str(record[field]).strip())


def regex(record: Mapping[str, Any], response: str, *, pattern: str, field: str = "answer") -> float:
    """1.0 if the first group (or the whole match) of the last match of `pattern` is the record's answer; else 0.0."""
    matches = list(re.finditer(pattern, response))
    if not matches:
        return 0.0
    text = matches[-1].group(1 if matches[-1].re.groups else 0)
    return float(text.strip() == str(record[field]).strip())


def characters(record: Mapping[str, Any], response: str, *, field: str = "answer") -> float:
    """Share of positions at which response and answer have the same character: partial credit, 0.0 to 1.0."""
    answer, given = str(record[field]).strip(), response.strip()
    length = max(len(answer), len(given))
    return sum(a == b for a, b in zip(answer, given, strict=False)) / length if length else 1.0
