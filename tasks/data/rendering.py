"""From a record to the text of its prompt and of its solved answer: a field, messages, or a template over fields."""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.errors import InputError
from tasks.config.data import DataSource
from tasks.data.files import Record
from tasks.data.tokenizer import TextCodec

Message = Mapping[str, Any]
_ASSISTANT = "assistant"


@dataclass(frozen=True)
class Rendered:
    """One prompt, ready for the tokenizer."""

    text: str
    answer: str | None
    """The solved answer by itself."""
    turn: str | None
    """The answer as the model is to give it."""
    chat: bool
    """Whether the chat template made the text, which then has all special tokens."""


@dataclass(frozen=True)
class Renderer:
    """How the records of one source become prompts."""

    source: DataSource
    codec: TextCodec
    where: str

    def render(self, record: Record, number: int) -> Rendered:
        """The prompt of a record.

        Args:
            number: of the record, from 1.

        Raises:
            InputError: it has no prompt, or one that the chat template refuses.
        """
        try:
            return self._render(record)
        except InputError as error:
            raise InputError(f"{self.where}, record {number}: {error}") from None

    def _render(self, record: Record) -> Rendered:
        found = self._found(record)
        answer = _answer(record.get(str(self.source.answer_field)))
        if isinstance(found, str) and not (self.source.chat or self.source.system):
            return Rendered(found, answer, answer, chat=False)
        messages = [{"role": "user", "content": found}] if isinstance(found, str) else found
        if self.source.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.source.system}, *messages]
        if messages[-1]["role"] == _ASSISTANT:
            messages, answer = messages[:-1], str(messages[-1]["content"])
        if not messages:
            raise InputError("the only message is the assistant's: give one of the user before it")
        text = self.codec.render(messages, answering=True)
        return Rendered(text, answer, self._turn(messages, text, answer), chat=True)

    def _found(self, record: Record) -> str | list[Message]:
        if self.source.prompt is not None:
            return fill(self.source.prompt, record)
        field = str(self.source.prompt_field)
        value = record.get(field)
        messages = _messages(value, field)
        if messages is not None:
            return messages
        if isinstance(value, str) and value:
            return value
        raise InputError(
            f"field {field!r} is {value!r}, but a text or messages are expected. Name the right field with "
            f"data.prompt_field or fix the record; its fields are {', '.join(map(str, record))}"
        )

    def _turn(self, messages: Sequence[Message], text: str, answer: str | None) -> str | None:
        """The assistant's turn as the chat template closes it; a template that rewrites what is before it cannot."""
        if answer is None:
            return None
        whole = self.codec.render([*messages, {"role": _ASSISTANT, "content": answer}], answering=False)
        return whole.removeprefix(text) if whole.startswith(text) else answer


def fill(template: str, record: Record) -> str:
    """A template with the fields of a record.

    Raises:
        InputError: the record lacks a field.
    """
    pieces = string.Formatter().parse(template)
    return "".join(before + ("" if name is None else _value(record, name)) for before, name, _, _ in pieces)


def _value(record: Record, name: str) -> str:
    if record.get(name) is None:
        raise InputError(
            f"data.prompt names the field {name!r}, which the record lacks: its fields are "
            f"{', '.join(str(field) for field, value in record.items() if value is not None)}"
        )
    return str(record[name])


def _messages(value: Any, field: str) -> list[Message] | None:
    """Messages, recognised by their form; None if the value is something else.

    Raises:
        InputError: one lacks its role or its text.
    """
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        value = _parsed(value)
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        return None
    if not any("role" in one for one in value):
        return None
    for number, one in enumerate(value, 1):
        for key in ("role", "content"):
            if not isinstance(one.get(key), str):
                raise InputError(
                    f"message {number} of field {field!r} has {key} = {one.get(key)!r}, but a text is expected"
                )
    # a column of tables in Parquet has every key in every row
    return [{key: inner for key, inner in one.items() if inner is not None} for one in value]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _answer(value: Any) -> str | None:
    """A solved answer: a text, or the last of some messages."""
    messages = _messages(value, "answer") if isinstance(value, list) else None
    if messages:
        return str(messages[-1]["content"])
    return None if value is None else str(value)
