"""Models that small runs have beside their own."""

from pathlib import Path

from tasks.config.model import GeneratedModel, ModelSection
from tasks.data.models import fill_model_directory


def made(folder: Path, seed: int, **sizes: int) -> Path:
    """A folder with a model of these sizes and random weights."""
    folder.mkdir(exist_ok=True)
    generated = GeneratedModel.model_validate({"layers": 2, "hidden": 16, "intermediate": 16, "heads": 2, **sizes})
    fill_model_directory(folder, ModelSection(generate=generated), seed)
    return folder
