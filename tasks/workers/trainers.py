"""The trainer ranks: one process each, around `trainer_core.trainer.Trainer`, and the handle that calls them all."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import InputError
from tasks.config.environment import Settings, trainer_environment
from tasks.workers.actors import WorkerGroup, fresh_names, spawn
from tasks.workers.scratch import new_folder
from trainer_core.batches.sequences import Samples, SupervisedExamples
from trainer_core.config import Device, OptimizerConfig, RankSpec, TrainerConfig
from trainer_core.trainer import Trainer
from trainer_core.weights.records import TensorRecord

CONTINUED = "continued"
"""What `TrainerRank.rng` says of generators that nothing but training has touched."""


class TrainerRank:
    """One rank, in its own process. Beside the trainer it knows which reference is loaded."""

    def __init__(self, model_dir: str, config: TrainerConfig, rank: RankSpec) -> None:
        """Meet the other ranks and build the model without weights."""
        self._trainer = Trainer(model_dir, config, rank)
        self._reference: str | None = None
        self._rng = CONTINUED

    def identity(self) -> str | None:
        """Identity of the committed state that this rank holds, or None."""
        return self._trainer.identity

    def adopt(self, identity: str) -> None:
        """See `Trainer.adopt`."""
        self._trainer.adopt(identity)

    def reference(self) -> str | None:
        """Identity of the reference that this rank holds, or None."""
        return self._reference

    def rng(self) -> str:
        """What became of the random generators since the last training: continued, restored or reseeded."""
        return self._rng

    def import_model(self) -> None:
        """See `Trainer.import_model`."""
        self._trainer.import_model()

    def load(self, directory: str, fresh_optimizer: bool = False) -> dict[str, object]:
        """See `Trainer.load`."""
        loaded = self._trainer.load(directory, fresh_optimizer)
        self._rng = str(loaded["rng"])
        return loaded

    def save(self, directory: str) -> list[str]:
        """See `Trainer.save`."""
        return self._trainer.save(directory)

    def train_policy(self, samples: Samples, temperature: float, reference: bool) -> dict[str, float]:
        """See `Trainer.train_policy`."""
        metrics = self._trainer.train_policy(samples, temperature, reference)
        self._rng = CONTINUED
        return metrics

    def train_supervised(
        self, examples: SupervisedExamples, steps: int, batch_size: int, optimizer: OptimizerConfig | None
    ) -> dict[str, float]:
        """See `Trainer.train_supervised`."""
        return self._trainer.train_supervised(examples, steps, batch_size, optimizer)

    def logprobs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """See `Trainer.logprobs`."""
        return self._trainer.logprobs(sequences)

    def load_reference(self, directory: str, identity: str) -> None:
        """See `Trainer.load_reference`; `identity` is that of the state in `directory`."""
        self._reference = None
        self._trainer.load_reference(directory)
        self._reference = identity

    def export(self, directory: str) -> list[TensorRecord]:
        """See `Trainer.export`."""
        return self._trainer.export(directory)


class TrainerGroup(WorkerGroup):
    """All trainer ranks. `call` names a method of `TrainerRank`; every call goes to every rank."""

    def __init__(self, labels: Sequence[str], actors: Sequence[Any], meeting_place: Path | None = None) -> None:
        super().__init__(labels, actors)
        self._meeting_place = meeting_place

    def end(self) -> None:
        """End the ranks' processes and remove the folder of their rendezvous."""
        super().end()
        if self._meeting_place is not None:
            shutil.rmtree(self._meeting_place, ignore_errors=True)

    def identity(self) -> str | None:
        """Identity of the committed state that all ranks hold; None if they hold none, or different ones."""
        return _common(self.call("identity"))

    def reference(self) -> str | None:
        """Identity of the reference that all ranks hold, or None."""
        return _common(self.call("reference"))


def start_trainers(
    prefix: str,
    model_dir: str,
    config: TrainerConfig,
    device: Device,
    settings: Settings,
    deterministic: bool = False,
) -> TrainerGroup:
    """Start the ranks of the layout without waiting for them. They meet at a file, so nothing listens for it.

    `deterministic` holds them to kernels whose results do not depend on timing.

    Raises:
        InputError: there are fewer cards than ranks.
    """
    world_size = config.parallel.world_size
    if device == "cuda" and world_size > len(settings.gpus):
        raise InputError(
            f"the layout {config.parallel} needs {world_size} GPUs, one a rank, and {len(settings.gpus)} are visible; "
            "choose a smaller layout under [train.parallel]"
        )
    environment = trainer_environment(device, settings.gpus, settings.local, deterministic)
    actors = spawn(fresh_names(prefix, world_size), [environment] * world_size, detached=not settings.local)
    # detached ranks outlive this process, and so must the folder
    meeting_place = new_folder() if settings.local else Path(tempfile.mkdtemp(prefix="ratchet-rendezvous-"))
    group = TrainerGroup(rank_labels(world_size), actors, meeting_place)
    ranks = rank_specs(world_size, meeting_place / "store", device, deterministic)
    group.start(TrainerRank, [(model_dir, config, rank) for rank in ranks])
    return group


def rank_specs(world_size: int, store: Path, device: Device, deterministic: bool) -> list[RankSpec]:
    """The places of the ranks of one host, which meet at the file `store`."""
    common = {"world_size": world_size, "store": str(store), "device": device, "deterministic": deterministic}
    return [RankSpec.model_validate({"rank": rank, "local_rank": rank, **common}) for rank in range(world_size)]


def rank_labels(world_size: int) -> list[str]:
    """What ranks are called in messages."""
    return [f"trainer rank {rank} of {world_size}" for rank in range(world_size)]


def _common(values: Sequence[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else None
