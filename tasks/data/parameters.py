"""Number of weights of a model, from its configuration and the sizes of its files."""

import math
from collections.abc import Mapping
from typing import Any

from tasks.config.model import ModelSection
from tasks.data.generated import shapes
from tasks.data.models import open_model

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
    folder = open_model(section)
    sizes = folder.files()
    return sum(sizes[name] for name in folder.weights())
