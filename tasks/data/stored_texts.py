"""The texts of a run's samples, from its stored prompts and tokenizer alone. Imports neither torch nor transformers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import batched

import pyarrow as pa
from tokenizers import Tokenizer

from storage.backends.root import Root
from storage.manifest import Manifest
from storage.parts import read_part, read_parts
from storage.reader import row_views
from storage.schema import PROMPTS
from tasks.data.backends import special_tokens
from tasks.data.tokenizer import without

_TOKENIZER = "model/tokenizer.json"
_PROMPTS = "train.arrow"
_ROWS = 256  # token ids become Python integers on the way


@dataclass(frozen=True)
class StoredTexts:
    """Texts of a run that stage `prepare` has stored."""

    tokenizer: Tokenizer | None
    """None if the model has no tokenizer.json; then no response has a text."""
    prompts: Mapping[str, str]
    """Text of each training prompt, by its id."""
    left_out: Collection[int]
    """Tokens that the texts of responses lack, as those do that rewards see."""

    @classmethod
    def of(cls, root: Root, prepared: Manifest) -> "StoredTexts":
        """From the manifest of stage `prepare`."""
        there, left_out = prepared.part_names, prepared.facts.get("left_out_tokens")
        content = read_part(root, prepared.part(_TOKENIZER)) if _TOKENIZER in there else None
        tokenizer = None if content is None else Tokenizer.from_buffer(content)
        if not isinstance(left_out, list):
            left_out = [] if tokenizer is None else special_tokens(tokenizer)
        parts = [prepared.part(_PROMPTS)] if _PROMPTS in there else []
        tables = [read_parts(root, [part], PROMPTS, ["prompt_id", "prompt"]) for part in parts]
        prompts = {
            name: text for one in tables for name, text in zip(*(column.to_pylist() for column in one), strict=True)
        }
        return cls(tokenizer, prompts, frozenset(left_out))  # pyright: ignore[reportArgumentType] - ids

    def __call__(self, samples: pa.Table) -> tuple[pa.Array, pa.Array]:
        """Texts of the prompts and responses of a rollout table; null where one is not known."""
        prompts = [self.prompts.get(name) for name in samples["prompt_id"].to_pylist()]
        return pa.array(prompts, pa.string()), pa.array(self._decoded(samples["response_tokens"]), pa.string())

    def _decoded(self, column: pa.ChunkedArray) -> list[str | None]:
        if self.tokenizer is None:
            return [None] * len(column)
        texts: list[str | None] = []
        for rows in batched(row_views(column), _ROWS):
            seen = [without(row.tolist(), self.left_out) for row in rows]
            texts += self.tokenizer.decode_batch(seen, skip_special_tokens=False)
        return texts
