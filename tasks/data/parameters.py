"""How many weights a model has, from its configuration and the sizes of its files."""

import math
from collections.abc import Mapping
from typing import Any

import fsspec

from storage.errors import InputError
from tasks.config.environment import resolve, without_secrets
from tasks.config.model import ModelSection
from tasks.data.generated import shapes

_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


def count_parameters(section: ModelSection, facts: Mapping[str, Any]) -> int:
    """The number of weights.

    Args:
        facts: the fields of the model's config.json.

    Raises:
        InputError: its files cannot be listed.
    """
    if section.generate is not None:
        return sum(math.prod(shape) for _, shape in shapes(section.generate))
    kind = str(facts.get("dtype") or facts.get("torch_dtype") or "float32").removeprefix("torch.")
    return _bytes_of_weights(section) // _SIZES.get(kind, 4)


def _bytes_of_weights(section: ModelSection) -> int:
    try:
        fs, path = fsspec.core.url_to_fs(str(resolve(section.source, "model.source")))
        files = fs.ls(path, detail=True)
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"model.source {section.source} cannot be listed: {without_secrets(str(error))}") from None
    return sum(int(file["size"]) for file in files if str(file["name"]).endswith(".safetensors"))
