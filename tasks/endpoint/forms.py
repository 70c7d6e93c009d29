"""Answers in the forms of OpenAI: whole, and in chunks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks.endpoint.requests import REASONING, Message
from tasks.endpoint.sessions import Asked
from tasks.environments.trajectory import Answer

_PIECE = 64  # characters of a chunk


class Answered(NamedTuple):
    asked: Asked
    answer: Answer
    message: Message

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls."""
        return "tool_calls" if self.message.calls else self.answer.finish_reason


@dataclass(frozen=True)
class Form:
    """The form of the answers to one request."""

    model: str
    chat: bool
    usage: bool  # True if the last chunk tells the number of tokens

    def whole(self, answers: Sequence[Answered]) -> dict[str, Any]:
        """All choices at once."""
        choices = [
            {**self._body(one.message), "index": place, "logprobs": None, "finish_reason": one.finish_reason}
            for place, one in enumerate(answers)
        ]
        return {**self._head(answers, ""), "choices": choices, "usage": _usage(answers)}

    def chunks(self, answers: Sequence[Answered]) -> Iterator[dict[str, Any]]:
        """The same in pieces. The answers are sampled whole before the first one."""
        head = self._head(answers, ".chunk" if self.chat else "")
        for place, one in enumerate(answers):
            empty = {"delta": {}} if self.chat else {"text": ""}
            last = {**empty, "finish_reason": one.finish_reason}
            for piece in (*self._pieces(one.message), last):
                choice = {"index": place, "logprobs": None, "finish_reason": None, **piece}
                yield {**head, "choices": [choice]}
        if self.usage:
            yield {**head, "choices": [], "usage": _usage(answers)}

    def _head(self, answers: Sequence[Answered], kind: str) -> dict[str, Any]:
        first = answers[0].asked.branch
        name = "chat.completion" if self.chat else "text_completion"
        number = f"{'chatcmpl' if self.chat else 'cmpl'}-{first.number}-{len(first.row.turns)}"
        return {"id": number, "object": f"{name}{kind}", "created": int(time.time()), "model": self.model}

    def _body(self, message: Message) -> dict[str, Any]:
        return {"message": _message(message)} if self.chat else {"text": message.content}

    def _pieces(self, message: Message) -> Iterator[dict[str, Any]]:
        if not self.chat:
            yield from ({"text": piece} for piece in _cut(message.content))
            return
        yield {"delta": {"role": message.role, "content": ""}}
        for key, text in ((REASONING[0], message.reasoning or ""), ("content", message.content)):
            yield from ({"delta": {key: piece}} for piece in _cut(text))
        for number, call in enumerate(_message(message).get("tool_calls", [])):
            yield {"delta": {"tool_calls": [{"index": number, **call}]}}


def _message(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.role, "content": message.content or (None if message.calls else "")}
    if message.reasoning is not None:
        said[REASONING[0]] = message.reasoning
    if message.calls:
        said["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in message.calls
        ]
    return said


def _cut(text: str) -> Iterator[str]:
    return (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))


def _usage(answers: Sequence[Answered]) -> Mapping[str, int]:
    given = len(answers[0].asked.tokens)
    made = sum(len(one.answer.tokens) for one in answers)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
