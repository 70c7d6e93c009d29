"""What a saved state says of itself in plain words, readable without torch."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.errors import InputError, StorageError
from trainer_core.config import OptimizerConfig, ParallelConfig, Precision

FACTS_FILE = "trainer.json"
OPTIMIZER_PREFIX = "optimizer."
"""What the optimizer's tensors, and the files that hold them alone, are called with."""


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
    """Whether the file `name` of a state is needed to take its weights, be it for a reference or a fresh optimizer.

    Of a state from before the optimizer had files of its own, all are.
    """
    return not name.startswith(OPTIMIZER_PREFIX)


def check_modules(directory: str, facts: StateFacts, transformer_engine: bool) -> None:
    """Refuse a state of the other kind of modules than the trainer's, which `transformer_engine` says.

    Both name their weights alike, but Transformer Engine's norms and attention also ask for entries of their own, and
    the two optimizers keep different settings. Raises InputError.
    """
    if facts.transformer_engine not in (None, transformer_engine):
        kinds = {True: "Transformer Engine's modules", False: "Megatron's own modules, without Transformer Engine"}
        raise InputError(
            f"the state at {directory} was saved by {kinds[facts.transformer_engine]}, and this trainer is built of "
            f"{kinds[transformer_engine]}; load it where Transformer Engine is "
            f"{'installed' if facts.transformer_engine else 'not installed'}"
        )


def write_facts(directory: str, facts: StateFacts) -> None:
    """Say beside the tensors in `directory` what they are."""
    Path(directory, FACTS_FILE).write_text(facts.model_dump_json(indent=1), encoding="utf-8")
