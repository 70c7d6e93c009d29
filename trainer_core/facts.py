"""What a saved state says of itself in plain words, readable without torch."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.errors import StorageError
from trainer_core.config import OptimizerConfig, ParallelConfig, Precision

FACTS_FILE = "trainer.json"


class StateFacts(BaseModel):
    """What a saved state is."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    step: int
    """Optimizer updates since the model was imported, warm-up included."""
    optimizer_updates: int
    """Updates of the optimizer that the state holds; 0 for a fresh one."""
    optimizer: OptimizerConfig
    """Configuration of that optimizer."""
    parallel: ParallelConfig
    """Layout that saved it."""
    precision: Precision
    """Type of the weights."""


def read_facts(directory: str) -> StateFacts:
    """What the state in `directory` is.

    Raises:
        StorageError: if there is no such state, or its facts cannot be read.
    """
    path = Path(directory, FACTS_FILE)
    try:
        return StateFacts.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise StorageError(f"no readable train state at {directory}: {error}; load it again from the store") from error


def write_facts(directory: str, facts: StateFacts) -> None:
    """Say beside the tensors in `directory` what they are."""
    Path(directory, FACTS_FILE).write_text(facts.model_dump_json(indent=1), encoding="utf-8")
