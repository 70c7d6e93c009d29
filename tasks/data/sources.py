"""Where a run's prompts and tokenizer come from: files on any fsspec filesystem, or generated."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from tasks.config.data import DataSection
from tasks.config.model import ModelSection
from tasks.config.run import RunConfig
from tasks.data.generated import generate_addition, generate_tokenizer
from tasks.data.models import MODEL_FILES, copy_files
from tasks.data.prompts import Record, check_lengths, prompt_table, read_records
from tasks.data.tokenizer import TextCodec


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
            copy_files(str(section.source), directory, lambda name: name in MODEL_FILES)
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


def _records(section: DataSection, seed: int) -> Mapping[str, Sequence[Record]]:
    if section.generate is not None:
        return generate_addition(section.generate, seed)
    urls = {"train": section.train, "held_out": section.held_out, "warmup": section.warmup}
    return {table: read_records(url) for table, url in urls.items() if url is not None}
