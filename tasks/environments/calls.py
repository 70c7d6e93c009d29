"""The parts of an answer by the tags that many families of models write: reasoning, text and calls of tools."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

TAGS = "tags"
"""Name of the form that is built in: `<think>` and, around JSON, `<tool_call>`: Hermes, Qwen 2.5, Qwen 3 and others."""
OPENED = "<tool_call>"
_CALL = re.compile(rf"{OPENED}\s*(.*?)\s*</tool_call>", re.DOTALL)
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
    """The parts of an answer in the form `TAGS`. A call that is no JSON stays text: it is the model's mistake."""
    thought, closed, rest = text.partition(_THOUGHT)
    reasoning = thought.strip().removeprefix("<think>").strip() if closed else None
    rest = rest.lstrip("\n") if closed else text
    found = [_call(one) for one in _CALL.findall(rest)] if tools else []
    if not found or None in found:
        return Parts(rest, reasoning)
    return Parts(rest[: rest.index(OPENED)].rstrip(), reasoning, tuple(one for one in found if one))


def recorded(parts: Parts) -> list[dict[str, str]]:
    """The calls of an answer as turns record them: `name`, and `arguments` as JSON."""
    return [{"name": name, "arguments": given} for name, given in parts.calls]


def _call(text: str) -> tuple[str, str] | None:
    try:
        found = json.loads(text)
        return str(found["name"]), json.dumps(found.get("arguments", {}), ensure_ascii=False)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
