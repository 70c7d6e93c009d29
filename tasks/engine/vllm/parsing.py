"""vLLM's parsers of tool calls and reasoning, without an engine: a program that reads a line for each answer.

Its arguments are a model directory and the names of both parsers; an empty name reads nothing of its kind. It writes
`{}` or the flaw of a name, then a line for each answer."""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

_LONGEST_S = 10.0  # for one answer: the time of some patterns grows exponentially with what a policy repeats


class Parsers:
    def __init__(self, model_dir: str, tools: str, reasoning: str) -> None:
        """Raises ValueError: one is not known, or the tokenizer lacks what it reads."""
        self._tools = _found(ToolParserManager.get_tool_parser, "tool", tools)
        self._reasoning = _found(ReasoningParserManager.get_reasoning_parser, "reasoning", reasoning)
        self._tokenizer = get_tokenizer(model_dir)
        signal.signal(signal.SIGALRM, _late)
        self._read("", [])

    def read(self, text: str, tools: list[Any]) -> dict[str, Any]:
        """Parts of an answer; parsers keep what they have read, so each answer has its own. What one cannot read stays
        text: it raises, or takes too long."""
        signal.setitimer(signal.ITIMER_REAL, _LONGEST_S)
        try:
            return self._read(text, tools)
        except Exception:  # noqa: BLE001 - parsers raise anything at what a policy, or a client's tool, holds
            return {"content": text, "reasoning": None, "calls": []}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _read(self, text: str, tools: list[Any]) -> dict[str, Any]:
        choice = "auto" if tools else "none"
        request = ChatCompletionRequest(messages=[], tools=tools or None, tool_choice=choice, seed=None)
        thought, rest = None, text
        if self._reasoning is not None:
            thought, left = self._reasoning(self._tokenizer).extract_reasoning(text, request)
            rest = left or ""
        calls = []
        if self._tools is not None:
            found = self._tools(self._tokenizer, request.tools).extract_tool_calls(rest, request)
            if tools and found.tools_called:
                rest = found.content or ""
                calls = [(one.function.name, one.function.arguments) for one in found.tool_calls]
        return {"content": rest, "reasoning": thought, "calls": calls}


def _found(get: Callable[[str], Any], kind: str, name: str) -> Any:
    try:
        return get(name) if name else None
    except KeyError as error:
        raise ValueError(f"vLLM has no {kind} parser {name!r}: {error.args[0]}") from None


def _late(*_: object) -> None:
    raise TimeoutError


def serve(descriptor: int) -> None:
    """Read the answers of standard input until they end; `descriptor` takes what is said."""
    with os.fdopen(descriptor, "w") as answers:

        def say(value: Any) -> None:
            answers.write(f"{json.dumps(value)}\n")
            answers.flush()

        try:
            parsers = Parsers(*sys.argv[1:4])
        except ValueError as error:
            say({"flaw": str(error)})
            return
        say({})
        for line in sys.stdin:
            say(parsers.read(*json.loads(line)))
