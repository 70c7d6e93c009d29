"""Where a run's model and prompts come from: folders and files on any fsspec filesystem, or generated."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import fsspec
import pyarrow as pa

from storage.errors import InputError
from tasks.config.data import DataSection
from tasks.config.environment import resolve
from tasks.config.model import ModelSection
from tasks.config.run import RunConfig
from tasks.data.generated import generate_addition, generate_model, generate_tokenizer
from tasks.data.prompts import Record, check_lengths, prompt_table, read_records
from tasks.data.tokenizer import TextCodec

_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def text_codec(section: ModelSection) -> TextCodec:
    """The tokenizer of the model that a run starts from, without reading the weights.

    Raises:
        InputError: the model directory does not exist or lacks a file.
    """
    with tempfile.TemporaryDirectory(prefix="ratchet-tokenizer-") as folder:
        directory = Path(folder)
        if section.generate is not None:
            generate_tokenizer(directory, section.generate)
        else:
            copy_files(str(section.source), directory, lambda name: name in _MODEL_FILES)
        return TextCodec.from_directory(directory)


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


def fill_model_directory(directory: Path, section: ModelSection, seed: int) -> list[str]:
    """Copy or generate the model that a run starts from; returns the names of its files, sorted."""
    if section.generate is not None:
        generate_model(directory, section.generate, seed)
    else:
        copy_model(str(section.source), directory)
    return sorted(path.name for path in directory.iterdir())


def copy_model(source: str, directory: Path) -> None:
    """Copy the files of a Hugging Face directory (local or any fsspec URL) to `directory`.

    Raises:
        InputError: the directory does not exist or holds no weights.
    """
    names = copy_files(source, directory, lambda name: name in _MODEL_FILES or _is_weights(name))
    if not any(map(_is_weights, names)):
        raise InputError(f"model.source {source} holds no safetensors files: convert the weights first")


def copy_files(source: str, directory: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Copy the files with wanted names from a folder on any fsspec filesystem to `directory`; returns their names.

    Raises:
        InputError: there is no such folder.
    """
    fs, path = fsspec.core.url_to_fs(str(resolve(source, "model.source")))
    try:
        names = sorted({str(name).rsplit("/", 1)[-1] for name in fs.ls(path, detail=False)})
    except FileNotFoundError:
        raise InputError(f"model.source {source} does not exist: give a Hugging Face directory") from None
    chosen = [name for name in names if wanted(name)]
    for name in chosen:
        fs.get_file(f"{path}/{name}", str(directory / name))
    return chosen


def _records(section: DataSection, seed: int) -> Mapping[str, Sequence[Record]]:
    if section.generate is not None:
        return generate_addition(section.generate, seed)
    urls = {"train": section.train, "held_out": section.held_out, "warmup": section.warmup}
    return {table: read_records(url) for table, url in urls.items() if url is not None}


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))
