"""From a record to the text of its prompt and of its solved answer: a field, messages, or a template over fields."""

import functools
import re
import string
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from storage.errors import InputError
from tasks.config.data import DataSource
from tasks.data.backends import Chat, Message
from tasks.data.chat import ASSISTANT, REASONING, Say, Template, Turn
from tasks.data.files import Record
from tasks.data.tokenizer import TextCodec
from tasks.data.values import flaw, is_blank, parsed, shown, text_of

_UNHEARD = Say(lambda _: None, lambda _kind, _sentence: None)


def _has(*keys: str) -> str:
    return "".join(rf"""(?=.*\b{key}([\\"']*\s*[:=]|["']\s*,))""" for key in keys)


_LIKE_MESSAGES = re.compile(
    r"[\s\ufeff]*("
    rf"""\w*\(*\s*[\[{{]{_has("role")}|(-\s|\w*[\[({{"'])({_has("role", "content")}|{_has("from", "value")}))""",
    re.DOTALL,
)  # forms of messages: JSON, as Python writes lists, arrays and objects, and as YAML: a bracket, and their keys


@dataclass(frozen=True)
class Rendered:
    """One prompt, ready for the tokenizer."""

    text: str
    answer: str | None  # the solved answer by itself
    turn: Turn | None  # the answer as the model is to give it
    chat: bool  # True if the chat template made the text, which then has all special tokens
    kinds: frozenset[str] = frozenset()
    """Parts of a conversation that not every record has: tools, tool calls, reasoning, a system text."""


@dataclass
class Notes:
    """Treatments of records that may not be meant."""

    places: dict[str, list[str]] = field(default_factory=dict)  # the records by their treatment

    def add(self, sentence: str, place: str) -> None:
        """Note it of a record, once."""
        there = self.places.setdefault(sentence, [])
        if there[-1:] != [place]:
            there.append(place)

    def sentences(self, where: str) -> Iterator[str]:
        """For people, each with the first record."""
        for sentence, places in self.places.items():
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            yield f"{where}, {places[0]}{more}: {sentence}"


@dataclass
class Renderer:
    source: DataSource
    codec: TextCodec
    where: str
    trained: bool = True  # True if the answers are trained on; else one that cannot be is not an error
    accept: Collection[str] = ()  # as `data.accept`
    notes: Notes = field(default_factory=Notes)
    used: set[str] = field(default_factory=set)
    """Settings that have had an effect: `tools_field`, and values of `accept`."""
    kinds: dict[str, str] = field(default_factory=dict)  # id of the first prompt of each kind (`Rendered.kinds`)
    records: int = 0  # number of records that were rendered
    fields: set[str] = field(default_factory=set)  # names of all their fields

    @functools.cached_property
    def template(self) -> Template:
        """The chat template, with all that is known of it."""
        return Template(self.codec)

    def render(self, record: Record, place: str) -> Rendered:
        """The prompt of a record. Raises InputError: it has none, or one that the chat template refuses."""
        self.records += 1
        self.fields.update(record)
        try:
            return self._render(record, self._say(place))
        except InputError as error:
            raise InputError(f"{self.where}, {place}: {error}") from None

    def _say(self, place: str) -> Say:
        def differ(kind: str, sentence: str) -> None:
            if kind not in self.accept:
                raise InputError(f"{sentence}. Change the answer or the template, or set data.accept = {[kind]}")
            self.used.add(kind)
            self.notes.add(sentence, place)

        return Say(lambda sentence: self.notes.add(sentence, place), differ)

    def _render(self, record: Record, say: Say) -> Rendered:
        found = self._found(record)
        solved = self._solved(record)
        if isinstance(found, str) and not (self.source.chat or self.source.system):
            answer = None if solved is None else str(solved["content"])
            return Rendered(found, answer, None if answer is None else Turn(answer), chat=False)
        messages = [{"role": "user", "content": found}] if isinstance(found, str) else found
        if self.source.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.source.system}, *messages]
        if messages[-1]["role"] == ASSISTANT:
            messages, solved = messages[:-1], _unless_empty(messages[-1])
        if not messages:
            raise InputError("the only message is the assistant's: give one of the user before it")
        chat = Chat(messages, self._tools(record))
        text = self.template.prompt(chat, say)
        answer = None if solved is None else str(solved["content"])
        turn = self._turn(chat, text, solved, say)
        return Rendered(text, answer, turn, chat=True, kinds=frozenset(_kinds(chat, solved)))

    def _tools(self, record: Record) -> list[Message]:
        name = str(self.source.tools_field)
        value = record.get(name)
        try:
            tools = parsed(value) if isinstance(value, str) and value.strip() else value
        except ValueError:
            tools = value
        if not tools:
            return []
        if not (isinstance(tools, list) and all(isinstance(one, dict) for one in tools)):
            fact = f"field {name!r} is {shown(value)}, but a list of tables that define tools is expected"
            raise InputError(f"{fact}, or JSON of it: correct it, or name another field with data.tools_field")
        self.used.add("tools_field")
        return tools

    def _solved(self, record: Record) -> Message | None:
        """The solved answer: a text, an integer, or the only message, of the assistant."""
        name = str(self.source.answer_field)
        value = record.get(name)
        messages = _messages(value, name) if isinstance(value, list) else None
        if messages is not None and len(messages) == 1 and messages[0]["role"] == ASSISTANT:
            return _unless_empty(messages[0])
        if (text := text_of(value)) is None and value is not None:
            raise InputError(
                f"field {name!r} is {shown(value)}, but an answer is a text, an integer or the assistant's message. "
                'Write one of these, or set data.answer_field = "" if only rewards read it'
            )
        return None if text is None else _unless_empty({"role": ASSISTANT, "content": text})

    def _found(self, record: Record) -> str | list[Message]:
        if self.source.prompt is not None:
            return fill(self.source.prompt, record)
        field = str(self.source.prompt_field)
        value = record.get(field)
        if (messages := _messages(value, field)) is not None:
            return messages
        if isinstance(value, str) and not is_blank(value):
            return value
        came = shown(value) if field in record else "missing"
        fact = f"field {field!r} is {came}, but a text or messages are expected"
        repair = "Name the right field with data.prompt_field or fix the record"
        raise InputError(f"{fact}. {repair}; its fields are {', '.join(map(str, record))}")

    def _turn(self, chat: Chat, text: str, solved: Message | None, say: Say) -> Turn | None:
        if solved is None:
            return None
        try:
            return self.template.turn(chat, text, solved, say if self.trained else _UNHEARD)
        except InputError:
            if self.trained:
                raise
            return None


def _kinds(chat: Chat, solved: Message | None) -> Iterator[str]:
    messages = [*chat.messages, *([] if solved is None else [solved])]
    yield from ["tools"] if chat.tools else []
    yield from ["a system text"] if any(one["role"] == "system" for one in messages) else []
    yield from ["tool calls"] if any(one.get("tool_calls") for one in messages) else []
    yield from ["reasoning"] if any(one.get(key) for one in messages for key in REASONING) else []


def fill(template: str, record: Record) -> str:
    """A template with the fields of a record. Raises InputError: the record lacks a field."""
    pieces = string.Formatter().parse(template)
    text = "".join(before + ("" if name is None else _value(record, name)) for before, name, _, _ in pieces)
    if is_blank(text):
        raise InputError(f"data.prompt gives {text!r} for it: fix or remove the record")
    return text


def _value(record: Record, name: str) -> str:
    if (value := record.get(name)) is None:
        there = ", ".join(str(field) for field, value in record.items() if value is not None)
        raise InputError(f"data.prompt names the field {name!r}, which the record lacks: its fields are {there}")
    if (text := text_of(value)) is None:
        fact = f"data.prompt names the field {name!r}, which is {shown(value)}: a text or an integer is expected"
        raise InputError(f"{fact}, so write it as the text that the prompt is to have")
    return text


def _messages(value: Any, field: str) -> list[Message] | None:
    """Messages, recognised by their form; None if the value is something else. Raises InputError: one lacks its role or
    its text, or a text looks like messages and is not their JSON."""
    if isinstance(value, str):
        value = _parsed(value, field)
    if not _are_messages(value):
        return None
    value = [{key: inner for key, inner in one.items() if inner is not None} for one in value]
    for number, one in enumerate(value, 1):
        if one.get("tool_calls"):
            one.setdefault("content", "")
        for key in ("role", "content"):
            if not isinstance(one.get(key), str):
                fact = f"message {number} of field {field!r} has {key} = {shown(one.get(key))}"
                raise InputError(f"{fact}, but a text is expected")
    return value


def _parsed(text: str, field: str) -> Any:
    """A text, or the messages whose JSON it is."""
    if not _LIKE_MESSAGES.match(text):
        return text
    try:
        if (flawed := flaw(found := parsed(text))) is None and _are_messages(found):
            return found
        reason = f"{flawed.place} {flawed.fact}" if flawed else " is not a list of messages"
    except (ValueError, RecursionError) as error:
        reason = f" is not JSON ({error})"
    fact = f"field {field!r} looks like messages, but{reason}: {shown(text)}. Write a JSON list of objects with role"
    raise InputError(f'{fact} and content, or set data.prompt = "{{{field}}}" if it is the text of the prompt itself')


def _are_messages(value: Any) -> bool:
    tables = isinstance(value, list) and all(isinstance(one, dict) for one in value)
    return tables and any("role" in one for one in value)


def _unless_empty(solved: Message) -> Message | None:
    """An answer; None if there is nothing in it to be seen, as CSV has no null."""
    return None if is_blank(solved["content"]) and not solved.get("tool_calls") else solved
