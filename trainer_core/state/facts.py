"""Facts of a saved state, readable without torch, and the names of its files."""

import json
import operator
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue

from storage.errors import InputError, StorageError
from trainer_core.config import OptimizerConfig, ParallelConfig, Precision
from trainer_core.frozen import Frozen
from trainer_core.lora import LoraConfig

FACTS_FILE = "trainer.json"
EFFECTIVE_FILE = "effective.json"  # effective settings of the parts that made a state, for people; nothing reads them
CRITIC = "critic"  # folder in that of a state with the state of a critic
_GENERATORS = "generators-"
OPTIMIZER_PREFIX = "optimizer."  # prefix of the names of the optimizer's tensors, and of the files that hold only those
FILES = "files"  # key of the number of files of its kind and rank, in the same place
SHAPES = "shapes"  # key of the shapes of whole tensors, as JSON, in the metadata of a safetensors file of a state
STATE_SCHEME = 1  # version of the rules by which a state gets its identity from what it holds


class StateIdentity(Frozen):
    """Digests of a state that depend neither on its files nor, except for the generators, on the layout."""

    scheme: int  # version of the rules: `STATE_SCHEME`
    tensors: str  # names, types, shapes and elements of all tensors: weights, main weights, moments
    progress: str  # updates, and configuration of the optimizer with its schedule
    generators: str  # the random generators of all ranks, and the layout whose ranks they are
    # a state without a critic does not have the key in its identity
    critic: str | None = Field(default=None, exclude_if=operator.not_)
    """Digest of tensors and progress of a critic."""

    def differences(self, other: "StateIdentity", generators: bool) -> list[str]:
        """Names of the fields that differ from `other`; the generators count only if they are asked for."""
        theirs = dict(other)
        return [name for name, own in self if own != theirs[name] and (generators or name != "generators")]

    def with_critic(self, digest: str) -> "StateIdentity":
        return self.model_copy(update={"critic": digest})


class LoraFacts(LoraConfig):
    """Adapters of a state, and the frozen weights that they belong to, which are not part of it."""

    base: str  # digest of names, types, shapes and elements of the frozen weights


class StateFacts(Frozen):
    step: int  # optimizer updates since the model was imported, warm-up included
    optimizer_updates: int  # updates of the optimizer that the state holds; 0 for a fresh one
    optimizer: OptimizerConfig  # configuration of that optimizer
    parallel: ParallelConfig  # ranks that saved it, however they divide their layers
    precision: Precision  # type of the weights
    transformer_engine: bool  # modules that saved it: Transformer Engine's, or else Megatron's own
    lora: LoraFacts | None = None  # the state holds adapters alone

    def layout(self) -> dict[str, JsonValue]:
        """The ranks that the random generators belong to."""
        return self.parallel.model_dump(mode="json", include={"tensor", "pipeline", "data"})

    def progress(self) -> dict[str, JsonValue]:
        """Facts that belong to the identity of the state; layout and modules do not."""
        found = self.model_dump(mode="json", include={"step", "optimizer_updates", "precision"})
        # a new key with a default does not change the identity of a stored state
        if self.lora is not None:
            found["lora"] = self.lora.model_dump(mode="json")
        return {**found, "optimizer": self.optimizer.model_dump(mode="json", exclude_defaults=True)}


class StateComparison(Frozen):
    weights: int
    """Weight tensors compared; one tensor holds a kind of weight of all layers, the layer is its first index."""
    optimizer: int  # tensors of the optimizer compared: both moments and the main weights
    rng: int  # values of random generators compared; an array counts as one
    other: int  # further values compared: optimizer settings, schedule, and what `trainer.json` says
    elements: int  # numbers compared, over all tensors and arrays
    planted: str | None  # name of the weight tensor in which a bit was flipped before comparing
    differences: tuple[str, ...]
    """One line for each tensor or value that differs or is in one state only; the tensors first."""


def read_facts(directory: Path) -> StateFacts:
    """Facts of the state in `directory`. Raises StorageError if there is no such state, or its facts cannot be read."""
    path = Path(directory, FACTS_FILE)
    try:
        return StateFacts.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise StorageError(f"no readable train state at {directory}: {error}; load it again from the store") from error


def tensor_files(rank: int, number: int = 0) -> tuple[str, str]:
    """Names of a rank's files with a number: that of weights, and that of the optimizer."""
    which = f"{rank}-{number}" if number else str(rank)
    return f"weights.{which}.safetensors", f"{OPTIMIZER_PREFIX}{which}.safetensors"


def generators_file(rank: int) -> str:
    return f"{_GENERATORS}{rank}.json"


def read_generators(directory: Path, rank: int) -> dict[str, Any]:
    """The random generators of a rank when the state was saved. Raises StorageError if the file cannot be read."""
    path = Path(directory, generators_file(rank))
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}; load the state again from the store") from error


def needed_for_weights(name: str) -> bool:
    """True if the file `name` of a state is needed to load its weights, for a reference."""
    return name != EFFECTIVE_FILE and not name.startswith((OPTIMIZER_PREFIX, _GENERATORS, f"{CRITIC}/"))


def needed_for_values(name: str) -> bool:
    """True if the file `name` of a state is needed to load the weights of its critic."""
    return name.startswith(f"{CRITIC}/") and needed_for_weights(name.removeprefix(f"{CRITIC}/"))


def check_base(directory: Path, facts: StateFacts, lora: LoraFacts | None) -> None:
    """Refuse a state whose adapters are not those that the trainer was built with, or belong to other weights. Raises
    InputError."""
    if facts.lora != lora:
        shown = [
            "whole weights" if one is None else f"adapters {one.model_dump(mode='json')}" for one in (facts.lora, lora)
        ]
        raise InputError(
            f"the state at {directory} holds {shown[0]}, but the trainer has {shown[1]}: give [train.lora] and the "
            "model that the state was made with"
        )


def check_critic(directory: Path, has: bool, begins: bool = False) -> bool:
    """Refuse a state with a critic for a trainer that `has` none, and vice versa, unless its critic `begins` with any
    state's weights. Returns whether the state has one. Raises InputError."""
    holds = Path(directory, CRITIC, FACTS_FILE).exists()
    if holds != has and not (begins and has):
        given, repair = ("no critic", "add [train.critic]") if not has else ("a critic", "leave [train.critic] out")
        there = "a critic" if not has else "no critic"
        raise InputError(f"the state at {directory} holds {there}, but the trainer has {given}: {repair}")
    return holds


def check_modules(directory: Path, facts: StateFacts, transformer_engine: bool) -> None:
    """Refuse a state saved by the other kind of modules than the trainer's, which `transformer_engine` gives. Both use
    the same names for weights, but Transformer Engine's norms and attention also need their own entries, and the two
    optimizers keep different settings. Raises InputError."""
    if facts.transformer_engine != transformer_engine:
        kinds = {True: "Transformer Engine's modules", False: "Megatron's own modules, without Transformer Engine"}
        raise InputError(
            f"the state at {directory} was saved by {kinds[facts.transformer_engine]}, but this trainer is built from "
            f"{kinds[transformer_engine]}; load it where Transformer Engine is "
            f"{'installed' if facts.transformer_engine else 'not installed'}"
        )
