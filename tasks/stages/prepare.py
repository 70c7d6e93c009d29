"""Stage `prepare` of iteration 0: the model directory and the prompt tables become parts of the run.

From here on the run depends on nothing outside its storage root.
"""

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import fsspec
import pyarrow as pa

from storage.backends.root import Root
from storage.errors import InputError
from storage.manifest import Manifest, Part
from storage.parts import PartWriter, materialize, read_parts
from storage.schema import PROMPTS, fingerprint
from tasks.config.run import DataSection, ModelSection, RunConfig
from tasks.data.generated import generate_addition, generate_model, generate_tokenizer
from tasks.data.prompts import Record, check_lengths, prompt_table, read_records
from tasks.data.tokenizer import TextCodec
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.stage import StageOutput, StageResult

MODEL = "model/"
_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_TABLES = ("train", "held_out", "warmup")


def prepare(context: RunContext) -> StageResult:
    """Record what the run is made from. A model or data set that is generated is made here, from the run's seed."""
    return context.stage(0, Stage.PREPARE, {}, lambda writer: _prepare(writer, context.config))


def model_directory(context: RunContext, prepared: Manifest) -> Path:
    """A local Hugging Face directory with the run's base model, verified when this process first asks for it."""
    folder, verified = context.scratch / "model", context.scratch / "model.verified"
    if not verified.exists() or verified.read_text(encoding="utf-8") != prepared.digest:
        materialize(context.root, prepared, folder, MODEL)
        verified.write_text(prepared.digest, encoding="utf-8")
    return folder


def prompts(context: RunContext, prepared: Manifest, table: str) -> pa.Table:
    """A stored prompt table: `train`, `held_out` or `warmup` (empty if the run has none)."""
    name = f"{table}.arrow"
    if name not in prepared.part_names:
        return PROMPTS.empty_table()
    return _stored(context.root, prepared.part(name))  # pyright: ignore[reportArgumentType] - frozen, so hashable


@functools.lru_cache(maxsize=len(_TABLES))  # four stages of every iteration ask, and a part never changes
def _stored(root: Root, part: Part) -> pa.Table:
    return read_parts(root, [part], PROMPTS)


def text_codec(section: ModelSection) -> TextCodec:
    """The tokenizer of the model that a run is to start from, before its weights are touched.

    Raises:
        InputError: the model directory is not there, or lacks a file.
    """
    with tempfile.TemporaryDirectory(prefix="ratchet-tokenizer-") as folder:
        directory = Path(folder)
        if section.generate is not None:
            generate_tokenizer(directory, section.generate)
        else:
            copy_files(str(section.source), directory, lambda name: name in _MODEL_FILES)
        return TextCodec.from_directory(directory)


def _records(section: DataSection, seed: int) -> Mapping[str, Sequence[Record]]:
    if section.generate is not None:
        return generate_addition(section.generate, seed)
    urls = {"train": section.train, "held_out": section.held_out, "warmup": section.warmup}
    return {table: read_records(url) for table, url in urls.items() if url is not None}


def _prepare(writer: PartWriter, config: RunConfig) -> StageOutput:
    with tempfile.TemporaryDirectory(prefix="ratchet-model-") as folder:
        directory = Path(folder)
        names = _fill_model_directory(directory, config.model, config.run.seed)
        codec = TextCodec.from_directory(directory)
        tables = prompt_tables(config, codec)
        model = [part.model_copy(update={"name": MODEL + part.name}) for part in writer.write_files(directory, names)]
    data = [writer.write_table(f"{name}.arrow", table, PROMPTS) for name, table in tables.items()]
    return StageOutput(
        parts=(*model, *data),
        schema_fingerprint=fingerprint(PROMPTS),
        facts={"cursor": 0},
        metrics={f"{name}_records": float(table.num_rows) for name, table in tables.items()},
    )


def prompt_tables(config: RunConfig, codec: TextCodec) -> dict[str, pa.Table]:
    """The tables of prompts a run is made from, tokenized.

    Raises:
        InputError: a data set is missing, empty or malformed, or a prompt does not fit into the context.
    """
    context = min(config.engine.max_model_len, codec.context)
    tables: dict[str, pa.Table] = {}
    for name, records in _records(config.data, config.run.seed).items():
        tables[name] = prompt_table(records, config.data, codec, name)
        check_lengths(tables[name], context, config.rollout.max_tokens, name)
    return tables


def _fill_model_directory(directory: Path, section: ModelSection, seed: int) -> list[str]:
    if section.generate is not None:
        generate_model(directory, section.generate, seed)
    else:
        copy_model(str(section.source), directory)
    return sorted(path.name for path in directory.iterdir())


def copy_model(source: str, directory: Path) -> None:
    """Bring the files of a Hugging Face directory (local or any fsspec URL) to `directory`.

    Raises:
        InputError: the directory or its weights are not there.
    """
    names = copy_files(source, directory, lambda name: name in _MODEL_FILES or _is_weights(name))
    if not any(map(_is_weights, names)):
        raise InputError(f"model.source {source} holds no safetensors files: convert the weights first")


def copy_files(source: str, directory: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Bring the files with a wanted name from a folder on any fsspec filesystem to `directory`; returns their names.

    Raises:
        InputError: there is no such folder.
    """
    fs, path = fsspec.core.url_to_fs(source)
    try:
        names = sorted({str(name).rsplit("/", 1)[-1] for name in fs.ls(path, detail=False)})
    except FileNotFoundError:
        raise InputError(f"model.source {source} is not there: give a Hugging Face directory") from None
    chosen = [name for name in names if wanted(name)]
    for name in chosen:
        fs.get_file(f"{path}/{name}", str(directory / name))
    return chosen


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))
