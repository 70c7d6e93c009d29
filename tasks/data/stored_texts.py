"""The texts of a run's samples, from its stored prompts and tokenizer alone. Imports neither torch nor transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import batched

import pyarrow as pa
from tokenizers import Tokenizer

from storage.backends.root import Root
from storage.manifest import Manifest
from storage.parts import read_part, read_parts
from storage.reader import row_views
from storage.schema import PROMPTS

_TOKENIZER = "model/tokenizer.json"
_PROMPTS = "train.arrow"
_ROWS = 256  # token ids become Python integers on the way


@dataclass(frozen=True)
class StoredTexts:
    """What stage `prepare` has stored of a run's texts."""

    tokenizer: Tokenizer | None
    """None if the model has no tokenizer.json; then no response has a text."""
    prompts: Mapping[str, str]
    """Text of each training prompt, by its id."""

    @classmethod
    def of(cls, root: Root, prepared: Manifest) -> "StoredTexts":
        """From the manifest of stage `prepare`."""
        there = prepared.part_names
        tokenizer = read_part(root, prepared.part(_TOKENIZER)) if _TOKENIZER in there else None
        parts = [prepared.part(_PROMPTS)] if _PROMPTS in there else []
        tables = [read_parts(root, [part], PROMPTS, ["prompt_id", "prompt"]) for part in parts]
        return cls(
            None if tokenizer is None else Tokenizer.from_buffer(tokenizer),
            {name: text for one in tables for name, text in zip(*(column.to_pylist() for column in one), strict=True)},
        )

    def __call__(self, samples: pa.Table) -> tuple[pa.Array, pa.Array]:
        """Texts of the prompts and responses of a rollout table; null where one is not known."""
        prompts = [self.prompts.get(name) for name in samples["prompt_id"].to_pylist()]
        return pa.array(prompts, pa.string()), pa.array(self._decoded(samples["response_tokens"]), pa.string())

    def _decoded(self, column: pa.ChunkedArray) -> list[str | None]:
        if self.tokenizer is None:
            return [None] * len(column)
        texts: list[str | None] = []
        for rows in batched(row_views(column), _ROWS):
            texts += self.tokenizer.decode_batch([row.tolist() for row in rows], skip_special_tokens=True)
        return texts
