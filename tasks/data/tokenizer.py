"""Text to token ids and back, by the tokenizer files of the model directory. Imports neither torch nor transformers."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from storage.errors import InputError
from storage.reader import row_views

TokenRow = Sequence[int] | NDArray[Any]
"""The token ids of one text."""

_BATCH_TOKENS = 1 << 15  # 1 MB as Python integers; other threads can run between two batches


@dataclass(frozen=True)
class TextCodec:
    """The tokenizer of one model directory."""

    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    context: int

    @classmethod
    def from_directory(cls, directory: Path) -> "TextCodec":
        """Read `tokenizer.json`, and the stop tokens and context length from `config.json`.

        Raises:
            InputError: a file is missing, or no stop token is configured.
        """
        for name in ("tokenizer.json", "config.json"):
            if not (directory / name).exists():
                raise InputError(f"model directory {directory} has no {name}: give a Hugging Face directory")
        config = json.loads((directory / "config.json").read_text())
        stop = config.get("eos_token_id")
        if stop is None:
            raise InputError(f"{directory}/config.json names no eos_token_id, so no response would ever stop")
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        return cls(tokenizer, tuple(stop if isinstance(stop, list) else [stop]), config["max_position_embeddings"])

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` for each text."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode_batch(self, rows: Iterable[TokenRow]) -> list[str]:
        """Texts of rows of token ids, without special tokens.

        The tokenizer requires lists; these never hold more than `_BATCH_TOKENS` tokens at once, or one row.
        """
        texts: list[str] = []
        for batch in _batches(rows):
            texts += self.tokenizer.decode_batch(batch, skip_special_tokens=True)
        return texts

    def decode_column(self, column: pa.ChunkedArray | pa.ListArray) -> list[str]:
        """`decode_batch` of a list column of a table or record batch: (N rows,) -> N texts."""
        return self.decode_batch(
            row_views(column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column]))
        )


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
