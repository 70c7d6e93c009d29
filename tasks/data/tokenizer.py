"""Text to token ids and back, by the tokenizer files of the model directory. Imports neither torch nor transformers."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from storage.errors import InputError


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
        """`encode` of each text."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode_batch(self, tokens: list[list[int]]) -> list[str]:
        """Texts of token ids, without special tokens."""
        return self.tokenizer.decode_batch(tokens, skip_special_tokens=True)
