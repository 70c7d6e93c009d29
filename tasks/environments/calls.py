"""The parts of an answer by the tags that many families of models write: reasoning, text and calls of tools."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tasks.data.values import is_encodable

TAGS = "tags"
"""Name of the form that is built in: `<think>` and, around JSON, `<tool_call>`: Hermes, Qwen 2.5, Qwen 3 and others."""
OPENED, _CLOSED = "<tool_call>", "</tool_call>"
_THOUGHT = "</think>"


class Parts(NamedTuple):
    content: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments, as JSON


Reader = Callable[[str, Sequence[Any]], Parts]  # takes the text of an answer and the tools that it may call


async def read_by(reader: Reader, text: str, tools: Sequence[Any]) -> Parts:
    """The parts of an answer. A reader that waits for another process does so in a thread."""
    return by_tags(text, tools) if reader is by_tags else await asyncio.to_thread(reader, text, tools)


def by_tags(text: str, tools: Sequence[Any]) -> Parts:
    """The parts of an answer in the form `TAGS`. A call that is not JSON stays text: it is the model's mistake."""
    thought, closed, rest = text.partition(_THOUGHT)
    reasoning = thought.strip().removeprefix("<think>").strip() if closed else None
    rest = rest.lstrip("\n") if closed else text
    found = [_call(one) for one in _between_tags(rest)] if tools else []
    if not found or None in found:
        return Parts(rest, reasoning)
    return Parts(rest[: rest.index(OPENED)].rstrip(), reasoning, tuple(one for one in found if one))


def recorded(parts: Parts) -> list[dict[str, str]]:
    """The calls of an answer as turns record them: `name`, and `arguments` as JSON."""
    return [{"name": name, "arguments": given} for name, given in parts.calls]


def _between_tags(text: str) -> list[str]:
    """The texts within the tags of calls. In linear time: a policy may repeat a tag, or white space, without end."""
    pieces = [piece.partition(OPENED) for piece in text.split(_CLOSED)[:-1]]
    return [inner.strip() for _, opened, inner in pieces if opened]


def _call(text: str) -> tuple[str, str] | None:
    try:
        found = json.loads(text)
        name, given = str(found["name"]), json.dumps(found.get("arguments", {}), ensure_ascii=False, allow_nan=False)
        return (name, given) if is_encodable(name + given) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
