"""Token ids that are trained on: an answer after the tokens of its prompt, up to one stop token."""

import unicodedata
from collections.abc import Iterator, Sequence

from storage.errors import InputError
from tasks.data.chat import Turn
from tasks.data.tokenizer import TextCodec
from tasks.data.values import shown


def targets(
    codec: TextCodec, prompts: Sequence[str], tokens: Sequence[list[int]], turns: Sequence[Turn | None]
) -> Iterator[list[int] | InputError | None]:
    """For each prompt the tokens of its turn, None if it has none, or why it cannot be trained.

    Args:
        prompts: N texts.
        tokens: their N rows of token ids, without what goes before a plain text.
    """
    there = [row for row, turn in enumerate(turns) if turn is not None]
    texts = {row: _text(codec, turns[row]) for row in there}  # pyright: ignore[reportArgumentType]
    wholes = dict(zip(there, codec.encode_batch([prompts[row] + texts[row] for row in there]), strict=True))
    alone = dict(zip(there, codec.encode_batch([texts[row] for row in there]), strict=True))
    bodies = dict(zip(there, codec.encode_batch([turns[row].body for row in there]), strict=True))  # pyright: ignore[reportOptionalMemberAccess]
    for row, turn in enumerate(turns):
        if turn is None:
            yield None
            continue
        prompt, whole = tokens[row], wholes[row]
        # where the tokenizer joins the end of the prompt with the answer, the model still samples after the prompt
        target = whole[len(prompt) :] if whole[: len(prompt)] == prompt else alone[row]
        yield _refusal(codec, turn, bodies[row], target) or codec.closed(target)


def _text(codec: TextCodec, turn: Turn) -> str:
    ends = set(codec.stop_tokens).isdisjoint(codec.encode(turn.end))
    return turn.body if ends else turn.body + turn.end


def _refusal(codec: TextCodec, turn: Turn, body: list[int], target: list[int]) -> InputError | None:
    early = next((token for token in (body if turn.end else body[:-1]) if token in codec.stop_tokens), None)
    if early is not None:
        return InputError(
            f"the answer {shown(turn.body)} holds the stop token {codec.visible([early])[0]!r}, and no response goes "
            "on after it: leave it out, or set rollout.stop_tokens"
        )
    (made,) = codec.backend.decode([target])
    if not _plain(made).startswith(_plain(turn.body)):
        return InputError(
            f"the tokenizer makes {shown(made)} of the answer {shown(turn.body)}, for want of tokens for some of its "
            "signs: correct the answer, or use another model"
        )
    return None


def _plain(text: str) -> str:
    """The part of a text that a tokenizer must keep: some compose accents, or leave a blank at the beginning out."""
    return "".join(unicodedata.normalize("NFC", text).split())
