"""Train state on disk: weights, optimizer and random generators, loadable under another layout.

megatron-core plans the boxes of whole tensors that each rank writes (`trainer_core.state.shards`). docs/storage.md,
"Train states", describes the files, and why its own writers are not used."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from storage.digest import value_digest
from storage.errors import StorageUnavailable
from trainer_core.model import rng
from trainer_core.model.mesh import Mesh
from trainer_core.model.model import Model
from trainer_core.model.optimizer import Optimizer
from trainer_core.platform.pinning import pinning_of
from trainer_core.state.content import Identifier
from trainer_core.state.facts import (
    EFFECTIVE_FILE,
    FACTS_FILE,
    StateFacts,
    StateIdentity,
    generators_file,
    read_generators,
)
from trainer_core.state.files import MappedFiles, SavedState, Shard, replace_file
from trainer_core.state.shards import LocalTensor, local_tensors, optimizer_shards, owned


def base_digest(model: Model, mesh: Mesh) -> str:
    """Digest of the frozen weights, equal under every layout. Collective."""
    held = [local for local in local_tensors(model, frozen=True) if local.speaks and local.first_replica]
    shards = [shard for local in held for shard in local.shards(local.tensor.detach().reshape(-1), 0)]
    return Identifier().tensors(shards, torch.zeros(0, dtype=torch.int64), mesh.device)[0]


class Saver:
    """Identifies and saves the states of one model in one process. From one save to the next it keeps what depends on
    the layout alone: who owns what, and the files."""

    def __init__(self, model: Model, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh
        self._identifier = Identifier()
        self._tensors: list[LocalTensor] | None = None
        self._files: MappedFiles | None = None

    def identity(self, optimizer: Optimizer, facts: StateFacts) -> StateIdentity:
        """Identity of the live state. Collective; raises as `Identifier.identity`."""
        return self._identity(self._owned(optimizer), facts, rng.capture())

    def save(self, directory: Path, optimizer: Optimizer, facts: StateFacts) -> tuple[list[str], StateIdentity]:
        """Write the live state into a folder, over the one that this object wrote there before. Collective. Returns the
        names of the files that this rank has written, and the identity of the state. Raises StorageUnavailable on every
        rank, if one of them has no room for its files; nothing was written."""
        shards, drawn, rank = self._owned(optimizer), rng.capture(), self._mesh.rank
        identity = self._identity(shards, facts, drawn)
        files = self._files_in(Path(directory), shards)
        files.fill(shards)
        written = {generators_file(rank): json.dumps(drawn)}
        if rank == 0:
            written[FACTS_FILE] = facts.model_dump_json(indent=1)
            written[EFFECTIVE_FILE] = json.dumps({**self._model.effective, **optimizer.effective}, indent=1)
        for name, text in written.items():
            replace_file(Path(directory, name), text.encode())
        self._mesh.wait()
        return [*files.names, *written], identity

    def _identity(self, shards: list[Shard], facts: StateFacts, drawn: dict[str, Any]) -> StateIdentity:
        mesh = self._mesh
        return self._identifier.identity(shards, facts, value_digest(drawn), mesh.rank, mesh.device)

    def _owned(self, optimizer: Optimizer) -> list[Shard]:
        optimizer.allocate()
        if self._tensors is None:
            self._tensors = local_tensors(self._model)
        return list(owned(self._tensors, optimizer))

    def _files_in(self, directory: Path, shards: list[Shard]) -> MappedFiles:
        """The files of this rank in a folder. Collective if they are new: all ranks have room for theirs, or none."""
        if self._files is not None and self._files.directory == directory:
            return self._files
        if self._files is not None:
            self._files.close()
            self._files = None
        directory.mkdir(parents=True, exist_ok=True)
        made: MappedFiles | StorageUnavailable
        try:
            made = MappedFiles(directory, self._mesh.rank, shards, pinning_of(self._mesh.device))
        except StorageUnavailable as error:
            made = error
        failures: list[StorageUnavailable | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, made if isinstance(made, StorageUnavailable) else None)
        for failure in filter(None, failures):
            if isinstance(made, MappedFiles):
                made.close()
            raise failure
        assert isinstance(made, MappedFiles)
        self._files = made
        return made


def load_state(
    directory: Path, model: Model, optimizer: Optimizer, mesh: Mesh, facts: StateFacts, restore_rng: bool
) -> None:
    """Continue from a saved state: weights, moments, place in the schedule, and under the same layout the RNG."""
    optimizer.allocate()
    state, tensors = SavedState(Path(directory)), local_tensors(model)
    _read(state, _weights(tensors))
    _read(state, optimizer_shards(tensors, optimizer))
    optimizer.resume(facts.optimizer_updates)
    if restore_rng:
        rng.restore(read_generators(directory, mesh.rank))


def load_weights(directory: Path, model: Model) -> None:
    """Load only the weights of a saved state; the files of its optimizer may be missing."""
    _read(SavedState(Path(directory), weights_alone=True), _weights(local_tensors(model)))


def _weights(tensors: list[LocalTensor]) -> Iterable[Shard]:
    return (shard for local in tensors for shard in local.shards(local.tensor.detach().view(-1), 0))


@torch.no_grad()
def _read(state: SavedState, shards: Iterable[Shard]) -> None:
    for shard in shards:
        if shard.padded:
            shard.values.zero_()
        for region, values in shard.regions():
            values.copy_(state.read(shard.box.name, region))
