"""What a saved state says about itself in plain words, readable without torch."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.errors import InputError, StorageError
from trainer_core.config import OptimizerConfig, ParallelConfig, Precision

FACTS_FILE = "trainer.json"
OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the names of the optimizer's tensors, and of the files that hold only those."""


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
    transformer_engine: bool | None = None
    """Whether Transformer Engine's modules saved it, or Megatron's own; older states do not say."""


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


def needed_for_weights(name: str) -> bool:
    """Whether the file `name` of a state is needed to load its weights, for a reference or with a fresh optimizer.

    For a state saved before the optimizer had its own files, all are.
    """
    return not name.startswith(OPTIMIZER_PREFIX)


def check_modules(directory: str, facts: StateFacts, transformer_engine: bool) -> None:
    """Refuse a state saved by the other kind of modules than the trainer's, which `transformer_engine` gives.

    Both use the same names for weights, but Transformer Engine's norms and attention also need their own entries, and
    the two optimizers keep different settings. Raises InputError.
    """
    if facts.transformer_engine not in (None, transformer_engine):
        kinds = {True: "Transformer Engine's modules", False: "Megatron's own modules, without Transformer Engine"}
        raise InputError(
            f"the state at {directory} was saved by {kinds[facts.transformer_engine]}, but this trainer is built from "
            f"{kinds[transformer_engine]}; load it where Transformer Engine is "
            f"{'installed' if facts.transformer_engine else 'not installed'}"
        )


def write_facts(directory: str, facts: StateFacts) -> None:
    """Write the facts of the tensors in `directory` beside them."""
    Path(directory, FACTS_FILE).write_text(facts.model_dump_json(indent=1), encoding="utf-8")
