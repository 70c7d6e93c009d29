"""Tokenizers behind one protocol: that of a generated model, by `tokenizers` alone, and any other, by transformers.

transformers knows what the makers of a model meant: which class reads its files, what begins a text, and the chat
template. Its import takes seconds, and a generated model's tokenizer is the same without it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Tokenizer

from storage.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""Turns of a conversation, each with role and content."""

PAD, STOP, UNKNOWN = "<pad>", "<eos>", "<unk>"
GENERATED: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": PAD,
    "eos_token": STOP,
    "unk_token": UNKNOWN,
    "clean_up_tokenization_spaces": False,
}
"""The tokenizer_config.json of generated models."""


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class Backend(Protocol):
    """A tokenizer."""

    @property
    def size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def stop(self) -> int | None:
        """The id of its end-of-sequence token."""
        ...

    @property
    def has_template(self) -> bool:
        """Whether it can render messages."""
        ...

    def encode(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """Token ids of each text; with `special`, between the tokens that the tokenizer puts around a text."""
        ...

    def decode(self, rows: list[list[int]], special: bool) -> list[str]:
        """Texts of rows of token ids; `special` tokens are shown or left out."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text; None if there is none."""
        ...

    def render(self, messages: Messages, answering: bool) -> str:
        """Messages as text; raises InputError."""
        ...


def read_backend(directory: Path) -> Backend:
    """The tokenizer of a Hugging Face directory. No code of the directory is run.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise InputError("the model directory has no tokenizer.json: give a Hugging Face directory with its tokenizer")
    return Plain(_plain_tokenizer(directory)) if _is_generated(directory) else Makers(_of_transformers(directory))


@dataclass(frozen=True)
class Plain:
    """A tokenizer without chat template, by `tokenizers` alone."""

    tokenizer: Tokenizer
    has_template: bool = False

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.tokenizer.get_vocab_size()

    @property
    def stop(self) -> int | None:
        """The id of its end-of-sequence token."""
        return self.tokenizer.token_to_id(STOP)

    def encode(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """As `Backend`."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=special)]

    def decode(self, rows: list[list[int]], special: bool) -> list[str]:
        """As `Backend`."""
        return self.tokenizer.decode_batch(rows, skip_special_tokens=not special)

    def token_id(self, text: str) -> int | None:
        """As `Backend`."""
        return self.tokenizer.token_to_id(text)

    def render(self, messages: Messages, answering: bool) -> str:
        """Raises InputError: there is no template."""
        raise InputError(_NO_TEMPLATE)


@dataclass(frozen=True)
class Makers:
    """A tokenizer as transformers reads it."""

    tokenizer: "PreTrainedTokenizerBase"

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.tokenizer)

    @property
    def stop(self) -> int | None:
        """The id of its end-of-sequence token."""
        return self.tokenizer.eos_token_id  # pyright: ignore[reportReturnType] - one token, so one id

    @property
    def has_template(self) -> bool:
        """Whether it can render messages."""
        return self.tokenizer.chat_template is not None

    def encode(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """As `Backend`."""
        if not texts:  # transformers asks for the type of the first
            return []
        return self.tokenizer(texts, add_special_tokens=special, return_attention_mask=False)["input_ids"]  # pyright: ignore[reportReturnType]

    def decode(self, rows: list[list[int]], special: bool) -> list[str]:
        """As `Backend`."""
        return self.tokenizer.batch_decode(rows, skip_special_tokens=not special)

    def token_id(self, text: str) -> int | None:
        """As `Backend`."""
        return self.tokenizer.get_vocab().get(text)

    def render(self, messages: Messages, answering: bool) -> str:
        """As `Backend`."""
        from jinja2 import TemplateError

        if not self.has_template:
            raise InputError(_NO_TEMPLATE)
        try:
            return self.tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType] - text, as it is not tokenized
                [dict(one) for one in messages], tokenize=False, add_generation_prompt=answering
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"the tokenizer's chat template refuses the messages: {error}") from None


_NO_TEMPLATE = (
    "the prompts are messages, but the model's tokenizer has no chat template: use a chat model, or give texts and set "
    "neither data.system nor data.chat"
)


def _is_generated(directory: Path) -> bool:
    try:
        return json.loads((directory / "tokenizer_config.json").read_bytes()) == GENERATED
    except (OSError, ValueError):
        return False


def _plain_tokenizer(directory: Path) -> Tokenizer:
    if not (directory / "tokenizer.json").is_file():
        raise InputError("the model directory has no tokenizer.json: give a Hugging Face directory with its tokenizer")
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def _of_transformers(directory: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer  # seconds, as it imports torch

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - whatever the parsers of its many formats raise
        raise InputError(
            f"the tokenizer of the model cannot be read ({str(error).replace(str(directory), 'the model directory')}): "
            "give a directory that transformers' AutoTokenizer reads without remote code"
        ) from None
