"""The output of stage `prepare`, as the other stages read it: the model directory and the prompt tables."""

import functools
import json
from pathlib import Path

import pyarrow as pa

from storage.backends.root import Root
from storage.manifest import Part
from storage.parts import materialize, read_parts
from storage.schema import PROMPTS
from tasks.data.tokenizer import TextCodec
from tasks.stages.context import RunContext
from tasks.stages.views import Prepared

MODEL = "model/"
"""Prefix of the names of the model's parts."""

_TABLES = 3


def model_directory(context: RunContext, prepared: Prepared) -> Path:
    """A local Hugging Face directory with the run's base model, verified on first use in this process."""
    folder, verified = context.scratch / "model", context.scratch / "model.verified"
    if not verified.exists() or verified.read_text(encoding="utf-8") != prepared.digest:
        materialize(context.root, prepared.manifest, folder, MODEL)
        verified.write_text(prepared.digest, encoding="utf-8")
    return folder


def text_codec(context: RunContext, prepared: Prepared) -> TextCodec:
    """The tokenizer of the run's base model."""
    return TextCodec.from_directory(model_directory(context, prepared))


def prompts(context: RunContext, prepared: Prepared, table: str) -> pa.Table:
    """A stored prompt table: `train`, `held_out` or `warmup` (empty if the run has none)."""
    name, manifest = f"{table}.arrow", prepared.manifest
    if name not in manifest.part_names:
        return PROMPTS.empty_table()
    return _stored(context.root, manifest.part(name))  # pyright: ignore[reportArgumentType] - frozen, so hashable


def records_of(table: pa.Table) -> dict[str, dict[str, object]]:
    """Whole dataset records by prompt id."""
    return dict(zip(table["prompt_id"].to_pylist(), map(json.loads, table["record"].to_pylist()), strict=True))


@functools.lru_cache(maxsize=_TABLES)  # four stages of every iteration read one, and a part never changes
def _stored(root: Root, part: Part) -> pa.Table:
    return read_parts(root, [part], PROMPTS)
