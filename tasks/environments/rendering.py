"""Rendering of messages for a conversation that is under way. What the policy has sampled is never tokenized again:
only new messages are rendered."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from storage.errors import InputError
from tasks.data.backends import Chat, Message, token_bytes
from tasks.data.chat import ASSISTANT, Say, Template, check_messages
from tasks.data.tokenizer import TextCodec

_MARK = "7463920158"  # stands for the last answer; no template strips it or changes its case
_CHARACTERS, _SURE = 8, 1.5  # of the first text that is tried, for each token that there may be; what is too many


class Following(NamedTuple):
    """Rendering of new messages after an answer."""

    tokens: list[int]
    kept: bool
    """True if the template, given the whole conversation as text, writes these same tokens after the same text; of a
    plain text, if it has the stop token that was sampled."""
    text: str | None = None
    """The whole conversation as the template writes it, up to the next answer; None without a template."""


class Renderer:
    """Rendering by the chat template of a model. A model without one reads the contents of messages one after another,
    without marks between them. A plain text is one message without a role. Of a text that has certainly more than
    `most` tokens, only the first are made, which are more than these."""

    def __init__(self, codec: TextCodec, note: Callable[[str], None] = lambda _: None, most: int | None = None) -> None:
        self._most = most
        self._codec, self._template, self._say = codec, Template(codec), Say(note, lambda _, said: note(said))

    @cached_property
    def unstoppable(self) -> str | None:
        """The reason for which no text can end an answer with this tokenizer; None if one can."""
        try:
            token_bytes(self._codec.backend)
        except InputError as error:
            return str(error)
        return None

    def first(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Token ids of the beginning of a conversation, up to the first answer. Raises InputError: the template refuses
        the messages or loses some of what they say, or there are tools and no template."""
        codec = self._codec
        if codec.has_template and messages[0]["role"]:
            return self._encode(self._template.prompt(Chat(messages, tools), self._say))
        if tools:
            raise InputError("the model has no chat template that could show it tools: describe them in a message")
        return codec.opened(self._encode(_plain(messages)))

    def after(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Message] = (),
        last: int | None = None,
        opened: str | None = None,
    ) -> Following:
        """Rendering of `new` messages up to the next answer. The last message of `before` is the policy's answer, whose
        content is the text that it sampled, and `last` its last token: a stop token ends the answer, so its text is not
        written again, but a plain text must begin with it. `opened` is `Following.text` of what precedes that answer,
        if it is known. Raises InputError: as `first`."""
        stop = self._codec.visible([last])[0] if last is not None and last in self._codec.stop_tokens else ""
        if not new[0]["role"]:
            text = str(new[0]["content"])
            return Following(self._encode(text.removeprefix(stop)), kept=text.startswith(stop))
        if not self._codec.has_template:
            return Following(self._encode(_plain(new)), kept=True)
        if opened is None:
            opened = self._codec.render(Chat(before[:-1], tools), answering=True)
        whole = self._codec.render(Chat([*before, *new], tools), answering=True)
        told = f"{opened}{before[-1]['content']}{stop}"
        kept = whole.startswith(told)
        rest = whole[len(told) :] if kept else self._behind_a_mark(before, new, tools).removeprefix(stop)
        check_messages(new, rest, self._say, len(before))
        return Following(self._encode(rest), kept, whole)

    def _behind_a_mark(self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Message]) -> str:
        """The text of new messages where the template writes another text of the answer before them."""
        marked = [*before[:-1], {"role": ASSISTANT, "content": _MARK}, *new]
        _, there, rest = self._codec.render(Chat(marked, tools), answering=True).rpartition(_MARK)
        if not there:
            raise InputError("the tokenizer's chat template does not write an answer as it was given")
        return rest

    def _encode(self, text: str) -> list[int]:
        if self._most is not None and len(text) > (first := _CHARACTERS * self._most):
            tokens = self._codec.encode(text[:first])
            if len(tokens) > _SURE * self._most:  # all of the text would be merged otherwise at the cut alone
                return tokens
        return self._codec.encode(text)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without its stop token."""
        kept = [token for token in tokens if token not in self._codec.stop_tokens]
        return self._codec.backend.decode([kept])[0]


def _plain(messages: Sequence[Message]) -> str:
    return "".join(str(one["content"]) for one in messages)
