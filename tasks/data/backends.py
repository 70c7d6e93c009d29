"""Tokenizers with the same methods: that of a generated model, by `tokenizers` alone, and any other, by transformers,
which knows what the makers of a model meant: which class reads its files, what begins a text, and the chat template.
Its import takes seconds, and a generated model's tokenizer is the same without it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from storage.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # a turn of a conversation, with role and content
PAD, STOP, UNKNOWN = "<pad>", "<eos>", "<unk>"
GENERATED: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": STOP, "unk_token": UNKNOWN,
    "clean_up_tokenization_spaces": False,
}  # fmt: skip
"""The tokenizer_config.json of generated models."""

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_NO_TEMPLATE = (
    "the prompts are messages, but the model's tokenizer has no chat template: use a chat model, or give texts and set "
    "neither data.system nor data.chat"
)
_BEFORE = "a"
_BATCH = 1 << 14
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_PRINTED = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The signs by which byte-level tokenizers write bytes (GPT-2's `bytes_to_unicode`, inverted)."""


@dataclass(frozen=True)
class Chat:
    """Input of a chat template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()  # definitions of the tools that the model may call

    def then(self, message: Message) -> "Chat":
        return Chat([*self.messages, message], self.tools)


@dataclass(frozen=True)
class Special:
    """Token ids of a tokenizer that are not text."""

    stop: int | None  # ends a sequence
    begin: int | None
    pad: int | None
    unknown: int | None  # stands for signs that no token has
    all: frozenset[int]


@dataclass(frozen=True)
class Plain:
    """A tokenizer without chat template, by `tokenizers` alone."""

    tokenizer: Tokenizer
    template: str | None = None  # chat template, or all of several; None if it cannot render messages

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.tokenizer.get_vocab_size()

    @property
    def special(self) -> Special:
        found = self.tokenizer.token_to_id
        return Special(found(STOP), None, found(PAD), found(UNKNOWN), special_tokens(self.tokenizer))

    def encode(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """Token ids of each text; with `special`, between the tokens that the tokenizer puts around a text."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=special)]

    def decode(self, rows: list[list[int]]) -> list[str]:
        """Texts of rows of token ids, special tokens included."""
        return self.tokenizer.decode_batch(rows, skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text; None if there is none."""
        return self.tokenizer.token_to_id(text)

    def token_text(self, token: int) -> str:
        """A token as the tokenizer writes it, empty if there is none of that id."""
        return self.tokenizer.id_to_token(token) or ""

    def render(self, chat: Chat, answering: bool) -> str:
        """Messages as text. Raises InputError."""
        raise InputError(_NO_TEMPLATE)


@dataclass(frozen=True)
class Makers:
    """A tokenizer as transformers reads it."""

    tokenizer: "PreTrainedTokenizerBase"

    @property
    def size(self) -> int:
        return len(self.tokenizer)

    @property
    def special(self) -> Special:
        found = self.tokenizer
        ids = frozenset(number for number, token in found.added_tokens_decoder.items() if token.special)
        named = (found.eos_token_id, found.bos_token_id, found.pad_token_id, found.unk_token_id)
        return Special(*named, ids)  # pyright: ignore[reportArgumentType] - one token, so one id

    @property
    def template(self) -> str | None:
        return None if self.tokenizer.chat_template is None else str(self.tokenizer.chat_template)

    def encode(self, texts: list[str], special: bool = False) -> list[list[int]]:
        if not texts:  # transformers asks for the type of the first
            return []
        return self.tokenizer(texts, add_special_tokens=special, return_attention_mask=False)["input_ids"]  # pyright: ignore[reportReturnType]

    def decode(self, rows: list[list[int]]) -> list[str]:
        if not rows:  # of which transformers makes one text
            return []
        return self.tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_id(self, text: str) -> int | None:
        return self.tokenizer.get_vocab().get(text)

    def token_text(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token) or "")

    def render(self, chat: Chat, answering: bool) -> str:
        if self.template is None:
            raise InputError(_NO_TEMPLATE)
        try:
            return self.tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType] - text, as it is not tokenized
                [dict(one) for one in chat.messages],
                tools=[dict(one) for one in chat.tools] or None,
                tokenize=False,
                add_generation_prompt=answering,
            )
        except Exception as error:  # noqa: BLE001 - a template is a program of the model's makers
            said = str(error) if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {error}"
            raise InputError(f"the tokenizer's chat template refuses the messages: {said}") from None


Backend = Plain | Makers


def read_backend(directory: Path) -> Backend:
    """The tokenizer of a Hugging Face directory, whose code is not run. Raises InputError: there is none to read."""
    generated = _is_generated(directory)
    if not any((directory / name).is_file() for name in (_TOKENIZERS[:1] if generated else _TOKENIZERS)):
        raise InputError("the model directory has no tokenizer.json: give a Hugging Face directory with its tokenizer")
    if generated:
        return Plain(Tokenizer.from_file(str(directory / "tokenizer.json")))
    from transformers import AutoTokenizer  # seconds, as it imports torch

    try:
        return Makers(AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True))
    except Exception as error:  # noqa: BLE001 - whatever the parsers of its many formats raise
        fact = str(error).replace(str(directory), "the model directory")
        repair = "give a directory that transformers' AutoTokenizer reads without remote code"
        raise InputError(f"the tokenizer of the model cannot be read ({fact}): {repair}") from None


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def _is_generated(directory: Path) -> bool:
    try:
        return json.loads((directory / "tokenizer_config.json").read_bytes()) == GENERATED
    except (OSError, ValueError):
        return False


def token_bytes(backend: Backend) -> list[bytes]:
    """The bytes that each token, special ones included, adds to a text when it follows another, by id. Raises
    InputError: the text of a token depends on the one before it."""
    (before,) = backend.encode([_BEFORE])
    (begun,) = backend.decode([before])
    found: list[bytes] = []
    for first in range(0, backend.size, _BATCH):
        ids = range(first, min(first + _BATCH, backend.size))
        texts = backend.decode([[*before, one] for one in ids])
        found += [_added(backend, one, begun, text) for one, text in zip(ids, texts, strict=True)]
    return found


def _added(backend: Backend, token: int, begun: str, text: str) -> bytes:
    if not text.startswith(begun):
        fact = f"its token {token} changes the text before it ({text!r} after {begun!r})"
        repair = "Leave out rollout.stop, or stop of a request, and set rollout.stop_tokens"
        raise InputError(f"no text can end a response with this tokenizer: {fact}. {repair}")
    added = text.removeprefix(begun)
    return _raw(backend.token_text(token)) or added.encode() if _UNDECODED in added else added.encode()


def _raw(written: str) -> bytes:
    """Bytes of a token that are not UTF-8 by themselves; none if the tokenizer does not write bytes so."""
    if len(written) == len("<0x00>") and written.startswith("<0x"):
        return bytes.fromhex(written[3:5])
    return bytes(_BYTES[sign] for sign in written) if all(sign in _BYTES for sign in written) else b""
