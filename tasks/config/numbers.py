"""Numbers of a configuration that have the right type and cannot work all the same."""

import re
from collections.abc import Iterator
from typing import Any

LARGEST = 2**31 - 1
"""Largest whole number: stored tables count in int32, and NumPy takes seeds of 32 bits, raised by ranks and steps."""
LONGEST_S = 1e8
"""Longest deadline, seconds: three years. The operating system's own limit is a few hundred."""

COLDEST = 0.01
"""The lowest temperature that vLLM samples at; it raises a lower one without a word that reaches the run."""

_FREE = re.compile(r"reward\.(functions\[\d+\]\.)?arguments\b")
"""Keys below belong to the reward function, which alone knows the values that it can use."""


def unusable_numbers(document: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """One message for each number in a configuration that cannot work: too large, too long, a negative seed."""
    for key, value in document.items():
        yield from _unusable(value, f"{prefix}{key}")


def _unusable(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield from unusable_numbers(value, f"{path}.")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _unusable(inner, f"{path}[{number}]")
    elif _FREE.match(path) is None and isinstance(value, int | float):
        yield from _out_of_range(value, path)


def _out_of_range(value: float, path: str) -> Iterator[str]:
    if path.endswith("seed") and not 0 <= value <= LARGEST:
        yield f"{path}: {value} cannot be a seed: give a whole number from 0 to {LARGEST}"
    elif isinstance(value, int) and abs(value) > LARGEST:
        yield f"{path}: {value} is too large: give at most {LARGEST}"
    elif path.endswith("_s") and value > LONGEST_S:
        yield f"{path}: {value:g} seconds are too long to wait for: give at most {LONGEST_S:g}"
