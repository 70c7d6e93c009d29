"""Rewards by comparison of strings."""

import re
from collections.abc import Mapping
from typing import Any

from tasks.data.values import shown, text_of


def gold(record: Mapping[str, Any], field: str) -> str:
    """The right answer of a record, without surrounding white space. Raises ValueError: it is neither a text nor an
    integer, or empty, so no response can be compared with it."""
    text = (text_of(record.get(field)) or "").strip()
    if not text:
        raise ValueError(
            f"field {field!r} of the record is {shown(record.get(field))}, but a text or an integer is compared with "
            "responses: name the right field as argument `field`, or use a function of your own"
        )
    return text


def exact_match(record: Mapping[str, Any], response: str, *, field: str = "answer") -> float:
    """1.0 if the response, without surrounding white space, is the record's answer; else 0.0."""
    return float(response.strip() == gold(record, field))


def regex(record: Mapping[str, Any], response: str, *, pattern: str, field: str = "answer") -> float:
    """1.0 if the first group (or the whole match) of the last match of `pattern` is the record's answer; else 0.0."""
    right, matches = gold(record, field), list(re.finditer(pattern, response))
    return float(bool(matches) and matches[-1].group(1 if matches[-1].re.groups else 0).strip() == right)


def characters(record: Mapping[str, Any], response: str, *, field: str = "answer") -> float:
    """Share of positions at which response and answer have the same character: partial credit, 0.0 to 1.0."""
    answer, given = gold(record, field), response.strip()
    return sum(a == b for a, b in zip(answer, given, strict=False)) / max(len(answer), len(given))
