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
from storage.manifest import Part
from storage.ownership.scratch import scratch
from storage.parts import PartWriter, materialize, read_parts
from storage.schema import PROMPTS
from tasks.config.data import DataSection
from tasks.config.model import ModelSection
from tasks.config.run import RunConfig
from tasks.data.drawing import Share
from tasks.data.hub import is_weights
from tasks.data.models import fill_model_directory
from tasks.data.tokenizer import TextCodec
from tasks.stages.context import RunContext
from tasks.stages.views import Prepared, View

MODEL = "model/"  # prefix of the names of the model's parts
TEACHER_MODEL, JUDGE_MODEL, CRITIC_MODEL = "teacher/", "judge/", "critic/"  # the same of other models

_TABLES = 3


def model_directory(context: RunContext, prepared: Prepared) -> Path:
    """A Hugging Face directory on each host with the run's base model, verified on first use in this process."""
    folder, verified = context.scratch / "model", context.scratch / "model.verified"
    if not verified.exists() or verified.read_text(encoding="utf-8") != prepared.digest:
        context.folders.fetch(context.root, prepared.manifest, folder, MODEL)
        verified.write_text(prepared.digest, encoding="utf-8")
    return folder


def store_model(
    writer: PartWriter, config: RunConfig, section: ModelSection | None, key: str, prefix: str
) -> tuple[Part, ...]:
    """Store the model of a section, which the setting `key` names, in parts that begin with `prefix`; nothing if there
    is none. Raises InputError: its directory cannot be read."""
    if section is None:
        return ()
    with scratch() as directory:
        names = fill_model_directory(directory, section, config.run.seed, key)
        return writer.write_files(directory, names, prefix)


def other_directory(context: RunContext, source: View, prefix: str) -> Path:
    """A Hugging Face directory on each host with such a model of a stage, verified on first use in this process; its
    name changes with its content. Raises InputError: the stage has stored none."""
    kind = prefix.rstrip("/")
    folder = context.scratch / f"{kind}-{source.digest[:16]}"
    verified = folder.with_suffix(".verified")
    if not verified.exists():
        if not source.manifest.below(prefix):
            raise InputError(
                f"{source.manifest.stage} of run {source.manifest.run!r} has stored no {kind}: a stage that is done "
                "again cannot get one. Start a new run, or train on the stored samples with `ratchet retrain`"
            )
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
