"""Rendering of histories: messages by the chat template, and plain texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.data.tokenizer import TextCodec
from tasks.environments.rendering import Following, Renderer

Messages = Sequence[Mapping[str, Any]]


class HistoryRenderer:
    """The renderer of conversations, and of texts, whose one message has no role."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec, self._chat = codec, Renderer(codec)

    def first(self, messages: Messages, tools: Messages = ()) -> list[int]:
        """Token ids before a first answer. Raises InputError: as `Renderer.first`."""
        if messages[0]["role"]:
            return self._chat.first(messages, tools)
        return self._codec.opened(self._codec.encode(messages[0]["content"]))

    def following(
        self, before: Messages, new: Messages, tools: Messages, last: int, opened: str | None
    ) -> Following | None:
        """Rendering of what is `new` behind an answer that ends with the token `last`; None if it cannot be appended:
        the template does not keep what was before, or a text lacks the stop token that was sampled. `opened` as in
        `Renderer.after`."""
        if new[0]["role"]:
            found = self._chat.after(before, new, tools, last, opened)
            return found if found.kept else None
        text, stop = new[0]["content"], ""
        if last in self._codec.stop_tokens:
            (stop,) = self._codec.visible([last])
        return Following(self._codec.encode(text.removeprefix(stop)), kept=True) if text.startswith(stop) else None

    def text(self, tokens: Sequence[int]) -> str:
        return self._chat.text(tokens)
