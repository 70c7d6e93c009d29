"""From the text of an answer to its parts, by the form of the model's family: reasoning, text and calls of tools."""

import json
import re
import threading
from collections.abc import Callable, Sequence
from subprocess import PIPE, Popen
from typing import Any, NamedTuple, Self

from storage.errors import InputError, WorkerLost
from tasks.engine.start import PARSER

TAGS = "tags"
"""Name of the form that is built in: `<think>` and, around JSON, `<tool_call>`: Hermes, Qwen 2.5, Qwen 3 and others."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_THOUGHT = "</think>"


class Parts(NamedTuple):
    """Parts of an answer."""

    content: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments, as JSON


Reader = Callable[[str, Sequence[Any]], Parts]
"""Takes the text of an answer and the tools that it may call."""


def by_tags(text: str, tools: Sequence[Any]) -> Parts:
    """The parts of an answer in the form `TAGS`. A call that is no JSON stays text: it is the model's mistake."""
    thought, closed, rest = text.partition(_THOUGHT)
    reasoning = thought.strip().removeprefix("<think>").strip() if closed else None
    rest = rest.lstrip("\n") if closed else text
    found = [_call(one) for one in _CALL.findall(rest)] if tools else []
    if not found or None in found:
        return Parts(rest, reasoning)
    return Parts(rest[: rest.index("<tool_call>")].rstrip(), reasoning, tuple(one for one in found if one))


class ForeignReader:
    """vLLM's parsers, by name, in a process of their own: their import takes seconds and a gigabyte."""

    def __init__(self, model_dir: str, tools: str, reasoning: str) -> None:
        """Raises InputError: one is not known."""
        self._lock = threading.Lock()
        self._process = Popen([*PARSER, model_dir, tools, reasoning], stdin=PIPE, stdout=PIPE, text=True)
        if "flaw" in (said := self._said()):
            self.close()
            raise InputError(said["flaw"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, text: str, tools: Sequence[Any]) -> Parts:
        """Raises WorkerLost: the process has ended."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{json.dumps([text, list(tools)])}\n")
            self._process.stdin.flush()
            said = self._said()
        return Parts(said["content"], said["reasoning"], tuple((name, given) for name, given in said["calls"]))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise WorkerLost("the process of vLLM's parsers has ended; the next attempt starts a new one")
        return json.loads(line)


def _call(text: str) -> tuple[str, str] | None:
    try:
        found = json.loads(text)
        return str(found["name"]), json.dumps(found.get("arguments", {}), ensure_ascii=False)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
