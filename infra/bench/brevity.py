"""The reward of the loop's bench. Imports little: the process of each reward stage imports it."""

from collections.abc import Mapping
from typing import Any

from tasks.rewards.sample import Sample


def brevity(record: Mapping[str, Any], response: str, sample: Sample) -> float:
    """A reward that random weights can earn: more for shorter responses."""
    return 1.0 / len(sample.tokens)
