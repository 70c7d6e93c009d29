"""Text to token ids and back, by the tokenizer of the model directory as its makers meant it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from storage.backends.root import Root
from storage.digest import bytes_digest, value_digest
from storage.errors import InputError
from storage.manifest import Manifest, find
from storage.parts import read_part, read_parts, row_views
from storage.schema import PROMPTS
from tasks.data.backends import Backend, Chat, Plain, read_backend, special_tokens
from tasks.data.hub import TEXT_FILES
from tasks.data.values import json_object

TokenRow = Sequence[int] | NDArray[Any]  # the token ids of one text
_BATCH_TOKENS = 1 << 15  # 1 MB as Python integers; other threads can run between two batches
_PROBE = "a"
_STORED_TOKENIZER = "model/tokenizer.json"
_PROMPTS = "train.arrow"


@dataclass(frozen=True)
class TextCodec:
    """The tokenizer of one model directory."""

    backend: Backend
    stop_tokens: tuple[int, ...]
    context: int  # longest sequence the model supports, in tokens
    begin: tuple[int, ...] = ()  # tokens that the tokenizer puts before a plain text, such as BOS
    vocabulary: int | None = None  # rows of the model's embedding
    identity: str = ""  # digest of the files it was read from, and of the stop tokens
    left_out: frozenset[int] = frozenset()  # tokens that the texts of responses lack

    @classmethod
    def from_directory(
        cls, directory: Path, stop_tokens: Sequence[int | str] | None = None, left_out: Collection[int] | None = ()
    ) -> "TextCodec":
        """The tokenizer of a directory, read once per process. `stop_tokens` are texts or ids that end a response,
        instead of all that the directory names: `eos_token_id` of config.json and of generation_config.json, and the
        tokenizer's. The texts of responses lack `left_out`, or all special tokens if it is None, beside stop, padding
        and BOS tokens. Raises InputError: a file is missing or cannot be used, or there is no stop token."""
        present = [name for name in TEXT_FILES if (directory / name).is_file()]
        digests = {name: bytes_digest((directory / name).read_bytes()) for name in present}
        if (identity := value_digest(digests)) not in _read:
            _read[identity] = _from_files(directory, identity)
        codec = _read[identity]._stopping_at(stop_tokens)
        special = codec.backend.special
        always = {*codec.stop_tokens, special.begin, special.pad} - {None}
        return replace(codec, left_out=frozenset(always | set(special.all if left_out is None else left_out)))  # pyright: ignore[reportArgumentType] - without None

    @property
    def has_template(self) -> bool:
        return self.backend.template is not None

    @property
    def special(self) -> frozenset[int]:
        """Tokens that are not text."""
        return self.backend.special.all

    @property
    def hides(self) -> bool:
        """True if texts lack more than stop, padding and BOS tokens."""
        special = self.backend.special
        return not self.left_out <= {*self.stop_tokens, special.begin, special.pad}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, as `encode`."""
        return self.backend.encode(texts)

    def opened(self, tokens: list[int]) -> list[int]:
        """Token ids of a plain text after what the tokenizer puts before it, unless they begin with that."""
        count = len(self.begin)
        return tokens if tuple(tokens[:count]) == self.begin else [*self.begin, *tokens]

    def render(self, chat: Chat, answering: bool) -> str:
        """Messages as text, by the chat template; with `answering` up to where the assistant's turn begins. Raises
        InputError: there is no chat template, or it refuses the messages."""
        return self.backend.render(chat, answering)

    def closed(self, tokens: list[int]) -> list[int]:
        """Token ids of an answer up to its first stop token; one is added if there is none."""
        first = next((place for place, token in enumerate(tokens) if token in self.stop_tokens), None)
        return [*tokens, self.stop_tokens[0]] if first is None else tokens[: first + 1]

    def visible(self, tokens: TokenRow) -> list[str]:
        """The text of each token, special ones included."""
        return self.backend.decode([[int(token)] for token in tokens])

    def decode_batch(self, rows: Iterable[TokenRow]) -> list[str]:
        """Texts of rows of token ids, without those that are left out. The tokenizer requires lists; these never hold
        more than `_BATCH_TOKENS` tokens at once, or one row."""
        return _decoded(self.backend, rows, self.left_out)

    def decode_column(self, column: pa.ChunkedArray | pa.ListArray) -> list[str]:
        """`decode_batch` of a list column of a table or record batch: (N rows,) -> N texts."""
        chunked = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
        return self.decode_batch(row_views(chunked))

    def _stopping_at(self, given: Sequence[int | str] | None) -> "TextCodec":
        stop = self.stop_tokens if given is None else tuple(self._stop_token(one) for one in given)
        if not stop:
            named = "config.json, generation_config.json and the tokenizer name none (eos_token_id)"
            raise InputError(f"no stop token is known, so no response would ever end: {named}. Set rollout.stop_tokens")
        return replace(self, stop_tokens=stop, identity=value_digest([self.identity, list(stop)]))

    def _stop_token(self, given: int | str) -> int:
        token = self.backend.token_id(given) if isinstance(given, str) else given
        if token is None or not 0 <= token < (self.vocabulary or self.backend.size):
            fact = f"rollout.stop_tokens: {given!r} is not a token of the model"
            raise InputError(f"{fact}: give a single token's text or its id")
        return token


_read: dict[str, TextCodec] = {}


def without(tokens: Sequence[int], left_out: Collection[int]) -> list[int]:
    """The tokens of a response whose text people and rewards see."""
    return [token for token in tokens if token not in left_out]


def _from_files(directory: Path, identity: str) -> TextCodec:
    config = _json(directory, "config.json")
    backend = read_backend(directory)
    context = config.get("max_position_embeddings")
    if not isinstance(context, int):
        fact = f"config.json of the model has max_position_embeddings = {context!r}"
        raise InputError(f"{fact}: add the longest sequence")
    vocabulary = config.get("vocab_size") if isinstance(config.get("vocab_size"), int) else None
    generation = _json(directory, "generation_config.json", optional=True)
    named = (*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id")), *_ids(backend.special.stop))
    stop = tuple(token for token in dict.fromkeys(named) if vocabulary is None or token < vocabulary)
    return TextCodec(backend, stop, context, _begin(backend), vocabulary, identity)


def _begin(backend: Backend) -> tuple[int, ...]:
    """Tokens put before a text; those put after it, such as EOS, would end the prompt before the response."""
    (plain,), (whole,) = backend.encode([_PROBE]), backend.encode([_PROBE], special=True)
    places = (place for place in range(len(whole)) if whole[place : place + len(plain)] == plain)
    return tuple(whole[: next(places, 0)]) if plain else ()


def _json(directory: Path, name: str, optional: bool = False) -> Mapping[str, Any]:
    if (directory / name).exists():
        return json_object((directory / name).read_bytes(), f"{name} of the model")
    if optional:
        return {}
    raise InputError(f"the model directory has no {name}: give a Hugging Face directory")


def _ids(named: Any) -> tuple[int, ...]:
    return tuple(one for one in (named if isinstance(named, list) else [named]) if isinstance(one, int))


def _decoded(backend: Backend, rows: Iterable[TokenRow], left_out: Collection[int]) -> list[str]:
    batches = ([without(row, left_out) for row in batch] for batch in _batches(rows))
    return [text for batch in batches for text in backend.decode(batch)]


def _batches(rows: Iterable[TokenRow]) -> Iterator[list[list[int]]]:
    batch: list[list[int]] = []
    tokens = 0
    for row in rows:
        if batch and tokens + len(row) > _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(row.tolist() if isinstance(row, np.ndarray) else list(row))
        tokens += len(row)
    if batch:
        yield batch


@dataclass(frozen=True)
class StoredTexts:
    """Texts of a run that stage `prepare` has stored."""

    tokenizer: Tokenizer | None  # None if the model has no tokenizer.json; then no response has a text
    prompts: Mapping[str, str]  # text of each training prompt, by its id
    left_out: Collection[int]  # tokens that the texts of responses lack, as those do that rewards see

    @classmethod
    def of(cls, root: Root, prepared: Manifest) -> "StoredTexts":
        there, left_out = prepared.part_names, prepared.facts.get("left_out_tokens")
        content = read_part(root, prepared.part(_STORED_TOKENIZER)) if _STORED_TOKENIZER in there else None
        tokenizer = None if content is None else Tokenizer.from_buffer(content)
        if not isinstance(left_out, list):
            left_out = [] if tokenizer is None else special_tokens(tokenizer)
        parts = [prepared.part(_PROMPTS)] if _PROMPTS in there else []
        tables = [read_parts(root, [part], PROMPTS, ["prompt_id", "prompt"]) for part in parts]
        prompts = dict(pair for one in tables for pair in zip(*(column.to_pylist() for column in one), strict=True))
        return cls(tokenizer, prompts, frozenset(left_out))  # pyright: ignore[reportArgumentType] - ids

    def __call__(self, samples: pa.Table) -> tuple[pa.Array, pa.Array]:
        """Texts of the prompts and responses of a rollout table; null where one is not known."""
        prompts = [self.prompts.get(name) for name in samples["prompt_id"].to_pylist()]
        if self.tokenizer is None:
            return pa.array(prompts, pa.string()), pa.nulls(len(samples), pa.string())
        responses = _decoded(Plain(self.tokenizer), row_views(samples["response_tokens"]), self.left_out)
        return pa.array(prompts, pa.string()), pa.array(responses, pa.string())


def texts_of(root: Root, run: str) -> StoredTexts | None:
    """The texts of a run; None if its prompts are not stored."""
    prepared = find(root, run, 0, "prepare")
    return None if prepared is None else StoredTexts.of(root, prepared)
