"""The output of stage `prepare`, as the other stages read it: the model directory and the prompt tables."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from storage.backends.root import Root
from storage.errors import InputError
from storage.manifest import Manifest, Part
from storage.ownership.scratch import scratch
from storage.parts import PartWriter, materialize, read_parts
from storage.schema import PROMPTS
from tasks.config.data import DataSection
from tasks.config.others import KEYS, Other, other_model
from tasks.config.run import RunConfig
from tasks.data.drawing import Share
from tasks.data.hub import is_weights
from tasks.data.models import fill_model_directory
from tasks.data.tokenizer import TextCodec
from tasks.stages.context import RunContext
from tasks.stages.views import Prepared, View

MODEL = "model/"  # prefix of the names of the model's parts

_TABLES = 3


def model_directory(context: RunContext, prepared: Prepared) -> Path:
    """A Hugging Face directory on each host with the run's base model, verified on first use in this process."""
    return _fetched(context, prepared, MODEL)


def store_other(writer: PartWriter, config: RunConfig, kind: Other) -> tuple[Part, ...]:
    """Store another model of the run, if any, at iteration 0. Raises InputError: its directory cannot be read."""
    if (section := other_model(config, kind)) is None:
        return ()
    with scratch() as directory:
        names = fill_model_directory(directory, section, config.run.seed, KEYS[kind])
        return writer.write_files(directory, names, f"{kind}/")


def other_parts(manifest: Manifest, kind: Other) -> Mapping[str, Part]:
    """Parts of another model that a stage has stored, by the names of its files; none if it has not."""
    return manifest.below(f"{kind}/")


def other_directory(context: RunContext, source: View, kind: Other) -> Path:
    """The same of another model that a stage has stored. Raises InputError: it has stored none."""
    if not other_parts(source.manifest, kind):
        raise InputError(
            f"{source.manifest.stage} of run {source.manifest.run!r} has stored no {kind}: a stage that is done "
            "again cannot get one. Start a new run, or train on the stored samples with `ratchet retrain`"
        )
    return _fetched(context, source, f"{kind}/")


def _fetched(context: RunContext, source: View, prefix: str) -> Path:
    """Folder of parts of a stage on each host; its name changes with their content."""
    folder = context.scratch / f"{prefix.rstrip('/')}-{source.digest[:16]}"
    verified = folder.with_suffix(".verified")
    if not verified.exists():
        context.folders.fetch(context.root, source.manifest, folder, prefix)
        verified.touch()
    return folder


def text_codec(context: RunContext, prepared: Prepared, stop: tuple[int, ...] | None = None) -> TextCodec:
    """The tokenizer of the run's base model, with other stop tokens or those that the run was prepared with."""
    stop = prepared.stop_tokens if stop is None else stop
    return TextCodec.from_directory(model_directory(context, prepared), stop, prepared.left_out_tokens)


def stored_codec(root: Root, prepared: Prepared) -> TextCodec:
    """The same without a process of the run: its files are read, and none is kept."""
    with scratch() as folder:
        materialize(root, prepared.manifest, folder, MODEL, lambda name: not is_weights(name))
        return TextCodec.from_directory(folder, prepared.stop_tokens, prepared.left_out_tokens)


def prompts(context: RunContext, prepared: Prepared, table: str) -> pa.Table:
    """A stored prompt table: `train`, `held_out` or `warmup` (empty if the run has none)."""
    name, manifest = f"{table}.arrow", prepared.manifest
    if name not in manifest.part_names:
        return PROMPTS.empty_table()
    return _stored(context.root, manifest.part(name))  # pyright: ignore[reportArgumentType] - frozen, so hashable


def shares(prepared: Prepared, config: DataSection) -> tuple[Share, ...]:
    """The sources that training prompts are drawn from by weight; none if they are one stream."""
    sources = config.sources("train")
    if all(source.weight is None for source in sources):
        return ()
    pairs = zip(prepared.train_rows, sources, strict=True)
    return tuple(Share(rows, 1.0 if source.weight is None else source.weight) for rows, source in pairs)


class Records(Mapping[str, dict[str, object]]):
    """Whole dataset records of a table of prompts by prompt id, each parsed when it is asked for."""

    def __init__(self, table: pa.Table) -> None:
        self._rows = {name: row for row, name in enumerate(table["prompt_id"].to_pylist())}
        self._records, self._tokens = table["record"], table["prompt_tokens"]

    def __getitem__(self, name: str) -> dict[str, object]:
        return json.loads(self._records[self._rows[name]].as_py())

    def tokens(self, name: str) -> NDArray[Any]:
        """(T,) int32 token ids of a prompt."""
        return self._tokens[self._rows[name]].values.to_numpy()

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@functools.lru_cache(maxsize=_TABLES)  # four stages of every iteration read one, and a part never changes
def _stored(root: Root, part: Part) -> pa.Table:
    return read_parts(root, [part], PROMPTS)
