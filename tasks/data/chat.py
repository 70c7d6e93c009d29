"""Chat templates. The text that one makes of a conversation is proven before it is sampled or trained.

A template is a program of a model's makers. It may drop a system text, strip an answer, open a block of reasoning, or
forget where the assistant begins; then the model would be given, or trained on, another text than was asked."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage.errors import InputError
from tasks.data.backends import Chat, Message
from tasks.data.tokenizer import TextCodec
from tasks.data.values import shown

ASSISTANT = "assistant"

_SENTINEL = "0918273645"  # no template strips it or changes its case
_ANSWER = f"{_SENTINEL}#"
REASONING = ("reasoning_content", "reasoning", "thinking")
_TAG = re.compile(r"([<\[])([^<>\[\]/\s]+)([>\]])\s*$")  # as <think> or [THINK]
_CLOSED = re.compile(r"</[^<>\s]+>|\[/[^\[\]\s]+\]")
_LONGEST = 60  # characters of a header in a message
_REPAIR = "correct the template (chat_template.jinja or tokenizer_config.json), or use another model"


@dataclass(frozen=True)
class Say:
    """The ways to tell about a record for which the template does something that may not be meant."""

    note: Callable[[str], None]  # takes a sentence, for people
    differ: Callable[[str, str], None]
    """Takes a value of `data.accept` and a sentence: other text is trained. Raises InputError unless it is accepted."""


@dataclass(frozen=True)
class Turn:
    """The trained text after a prompt."""

    body: str  # the answer, with what the chat template puts before it
    end: str = ""  # the end that the chat template writes


@dataclass(frozen=True)
class _Frame:
    """The text that a template writes around an answer."""

    generation: str  # the generation prompt; empty if the template has none
    opened: str  # text of the generation prompt where a turn with an answer has the answer already
    end: str
    stops: bool  # True if the end has a stop token


@dataclass(frozen=True)
class Template:
    codec: TextCodec
    _frames: dict[object, _Frame | None] = field(default_factory=dict)

    def prompt(self, chat: Chat, say: Say) -> str:
        """The text that the model is to answer. Raises InputError: the template refuses the messages, loses some of
        what they say, or does not open the turn."""
        text = self.codec.render(chat, answering=True)
        check_messages(chat.messages, text, say)
        _check_given(_leaves(chat.tools, ("name", "description")), text, "the tools")
        frame = self._frame(chat)
        opens = frame is not None and frame.generation and text.endswith(frame.generation)
        if not opens and self.codec.render(chat, answering=False) == text:
            self._check_unopened(chat, text, say)
        if frame is not None and not frame.stops:
            say.note(self._unended(frame.end))
        if "strftime_now" in (self.codec.backend.template or ""):
            say.note("the chat template may write the date: today's is stored, and a run made tomorrow has another")
        return text

    def turn(self, chat: Chat, text: str, message: Message, say: Say) -> Turn:
        """The assistant's turn after the prompt `text`. Raises InputError: what the template makes of it does not
        continue the prompt, or is another answer."""
        whole, frame = self.codec.render(chat.then(message), answering=False), self._frame(chat)
        if frame is None:
            raise InputError(f"the tokenizer's chat template does not write the answer {shown(message['content'])}")
        turn = _continued(text, whole, frame, message, say) or _after_opening(frame, message, say)
        if turn is None:
            raise InputError(_another(text, whole, message))
        if not frame.stops:
            say.differ("end", self._unended(frame.end))
        for key in REASONING:
            _check_given([message[key]] if message.get(key) else [], turn.body, f"the answer's {key}")
        _check_given(_leaves(message.get("tool_calls")), turn.body, "the answer's tool calls")
        return turn

    def _frame(self, chat: Chat) -> _Frame | None:
        """The text around an answer to these messages; None if the template refuses. Probed once for messages alike."""
        alike = (*(str(one["role"]) for one in chat.messages), bool(chat.tools))
        if alike not in self._frames:
            self._frames[alike] = self._probed(chat)
        return self._frames[alike]

    def _probed(self, chat: Chat) -> _Frame | None:
        marks = [f"{_SENTINEL}{number}." for number in range(len(chat.messages))]
        plain = Chat([{**one, "content": mark} for one, mark in zip(chat.messages, marks, strict=True)], chat.tools)
        found = self._answered(plain)
        for one, mark in zip(chat.messages, marks, strict=True):
            if found is not None and mark not in found[1] and not one.get("tool_calls"):
                raise InputError(_lost(f"the {one['role']}'s text", str(one["content"])))
        found = found or self._answered(chat)  # a template may want more of a text, such as JSON of a tool
        if found is None:
            return None
        bare, text, whole = found
        if whole.count(_ANSWER) > 1:
            raise InputError(f"the tokenizer's chat template writes an answer more than once: {_REPAIR}")
        before, there, end = whole.partition(_ANSWER)
        if not there:
            return None
        stops = not set(self.codec.stop_tokens).isdisjoint(self.codec.encode(end))
        return _Frame(_after(bare, text), _after(before, text), end, stops)

    def _answered(self, chat: Chat) -> tuple[str, str, str] | None:
        """The messages, the prompt, and the same with an answer; None if the template refuses the messages."""
        try:
            bare = self.codec.render(chat, answering=False)
            text, again = (self.codec.render(chat, answering=True) for _ in range(2))
            whole = self.codec.render(chat.then({"role": ASSISTANT, "content": _ANSWER}), answering=False)
        except InputError:
            return None
        if text != again:
            raise InputError(f"the tokenizer's chat template makes another text of the same messages: {_REPAIR}")
        return bare, text, whole

    def _check_unopened(self, chat: Chat, text: str, say: Say) -> None:
        """Refuse a prompt that ends before a header which the model would have to write."""
        whole = self.codec.render(chat.then({"role": ASSISTANT, "content": _ANSWER}), answering=False)
        header = whole.removeprefix(text).partition(_ANSWER)[0]
        if header.strip():
            fact = "the tokenizer's chat template ignores add_generation_prompt: the prompt ends before"
            repair = "Let the template write that where add_generation_prompt is true"
            raise InputError(f"{fact} {shown(header[-_LONGEST:])}, which the model would have to write. {repair}")
        say.note(f"the chat template has no generation prompt: an answer follows {shown(text[-20:])}")

    def _unended(self, end: str) -> str:
        first = self.codec.visible(self.codec.stop_tokens[:1])[0]
        special = [token for token in self.codec.encode(end) if token in self.codec.special]
        repair = f": to end them so, set rollout.stop_tokens = {json.dumps(self.codec.visible(special[:1]))}"
        return (
            f"the chat template ends a turn with {shown(end)}, which has no stop token: responses end only with one, "
            f"and a trained turn ends with {first!r} instead{repair if special else ''}"
        )


def _after(before: str, text: str) -> str:
    """The rest of a text after its beginning; empty if it begins with something else."""
    return text.removeprefix(before) if text.startswith(before) else ""


def _continued(text: str, whole: str, frame: _Frame, message: Message, say: Say) -> Turn | None:
    """The turn as the template writes it; None if that has another answer."""
    if not (whole.startswith(text) and whole.endswith(frame.end)):
        return None
    body, answer = whole[len(text) : len(whole) - len(frame.end)], str(message["content"])
    if message.get("tool_calls"):  # they come after the text
        return Turn(body, frame.end) if _within(answer, body) else None
    if (text + body).endswith(answer) and (body or not answer):
        return Turn(body, frame.end)
    if answer.strip() and body.strip() and (text + body).rstrip().endswith(answer.strip()):
        say.differ("blanks", "the chat template leaves blanks around the answer out, and it is trained without them")
        return Turn(body, frame.end)
    return None


def _after_opening(frame: _Frame, message: Message, say: Say) -> Turn | None:
    """The answer after a block that the generation prompt opens, and that the template drops from a turn."""
    answer, opened = str(message["content"]), frame.opened
    if not opened or message.get("tool_calls") or any(message.get(key) for key in REASONING):
        return None
    tag = _TAG.search(opened)
    closes = tag is not None and f"{tag[1]}/{tag[2]}{tag[3]}" in answer and tag[0].strip() not in answer
    if opened.strip() and not (answer.startswith(opened) or closes):
        return None
    say.note(
        f"the generation prompt ends with {shown(opened)}, which the chat template leaves out of a turn with an "
        "answer: the answer is trained from there on, as it was given"
    )
    return Turn(answer.removeprefix(opened), frame.end)


def _lost(kind: str, text: str) -> str:
    other = " or put it into the user's message" if kind.startswith("the system") else ""
    return f"the tokenizer's chat template drops or changes {kind}, {shown(text)}: leave it out{other}, or {_REPAIR}"


def _another(text: str, whole: str, message: Message) -> str:
    same = next((at for at, (one, other) in enumerate(zip(text, whole, strict=False)) if one != other), len(text))
    answer, made = shown(str(message["content"])), shown(whole[same:])
    if same == len(text):
        return (
            f"the tokenizer's chat template makes {made} of the answer {answer}: the trained turn would not be that "
            f"answer. Give it as the template writes it, or {_REPAIR}"
        )
    return (
        f"the tokenizer's chat template does not continue the prompt with the answer {answer}: the prompt goes on with "
        f"{shown(text[same:])}, where the turn has {made}. Give an answer that continues the prompt (one that closes "
        f"the block which it opens), or {_REPAIR}"
    )


def check_messages(messages: Sequence[Message], text: str, say: Say, before: int = 0) -> None:
    """Refuse a text that lacks what messages say, and tell what of them the template may leave out. There are so many
    messages `before` them. Raises InputError."""
    for number, message in enumerate(messages, before + 1):
        _check_message(message, number, text, say)


def _check_message(message: Message, number: int, text: str, say: Say) -> None:
    role, content = str(message["role"]), str(message["content"])
    after = _CLOSED.split(content)[-1].strip()
    if content not in text:
        if _within(content.strip(), text):
            say.note(f"the chat template changes blanks or signs of the {role}'s text")
        elif role == ASSISTANT and _CLOSED.search(content) and after in text:
            say.note("the chat template leaves the reasoning of earlier turns out")
        else:
            raise InputError(_lost(f"the {role}'s text (message {number})", content))
    _check_given(_leaves(message.get("tool_calls")), text, f"the tool calls of message {number}")
    for key in message.keys() - {"role", "content", "tool_calls", "tool_call_id", "id"}:
        if not all(_within(leaf, text) for leaf in _leaves(message[key])):
            what = "the reasoning of earlier turns" if key in REASONING else f"the field {key!r} of messages"
            say.note(f"the chat template leaves {what} out")


def _check_given(given: Iterable[str], text: str, kind: str) -> None:
    for one in given:
        if not _within(one, text):
            raise InputError(_lost(kind, one))


def _leaves(value: Any, only: Collection[str] = (), key: str = "") -> Iterator[str]:
    """The texts and numbers in nested tables, or those under some keys, and the names of arguments."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if key in ("arguments", "properties"):
                yield str(name)
            if name not in ("id", "type"):
                yield from _leaves(inner, only, str(name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _leaves(inner, only, key)
    elif value is not None and not isinstance(value, bool) and (not only or key in only):
        yield value if isinstance(value, str) else json.dumps(value)


def _within(part: str, text: str) -> bool:
    """True if a text holds another as it is, without blanks around it, or as JSON writes it."""
    part = part.strip()
    return part in text or any(json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))
