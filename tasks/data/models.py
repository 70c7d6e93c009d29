"""Where a run's model comes from: a folder on any fsspec filesystem, or generated."""

from collections.abc import Callable
from pathlib import Path

import fsspec

from storage.errors import InputError
from tasks.config.environment import resolve
from tasks.config.model import ModelSection
from tasks.data.generated import generate_model
from tasks.data.tokenizer import TOKENIZER_FILES

MODEL_FILES = TOKENIZER_FILES
"""What is taken from a Hugging Face directory besides the weights."""


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
    names = copy_files(source, directory, lambda name: name in MODEL_FILES or _is_weights(name))
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


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))
