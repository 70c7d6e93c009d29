"""Train state on disk: weights, optimizer, schedule and random generators, loadable under another layout.

megatron-core's distributed checkpoint (torch_dist) holds the tensors, those of the optimizer in separate files;
`trainer.json` beside it says in plain words what the state is.
"""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from trainer_core.model import rng
from trainer_core.model.mesh import Mesh
from trainer_core.model.model import Model
from trainer_core.model.optimizer import Optimizer
from trainer_core.platform.platform import quietly
from trainer_core.state.facts import OPTIMIZER_PREFIX, StateFacts, write_facts
from trainer_core.state.pickles import check_pickles
from trainer_core.state.repeatable import unshared
from trainer_core.state.writer import scratch_writer

_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",  # the one that can change TP and PP
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


@contextlib.contextmanager
def _nothing_to_collect() -> Iterator[None]:
    """Hide existing objects from the garbage collector; also a decorator.

    megatron-core's sharded_state_dict collects all garbage. In a process with torch and megatron-bridge that visits
    so many objects that it takes longer than all the rest of saving or loading a small model.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Saver:
    """Saves the states of one model in one process.

    From one save to the next it keeps what depends on the layout alone: which rank writes which shard.
    """

    def __init__(self) -> None:
        # loading the weights alone need not fetch the optimizer
        self._strategy = TorchDistSaveShardedStrategy(separation_hint=OPTIMIZER_PREFIX, cached_metadata=True)
        self._validated = False

    @_nothing_to_collect()
    def save(self, directory: str, model: Model, optimizer: Optimizer, mesh: Mesh, facts: StateFacts) -> list[str]:
        """Write the state into an empty directory; returns the names of the files this rank has written. Collective.

        The same state saved again, in another folder or by another process, gives the same bytes.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        state = _sharded_state(model, optimizer, mesh)
        with quietly(), scratch_writer():
            dist_checkpointing.save(
                unshared(state),
                directory,
                self._strategy,
                validate_access_integrity=not self._validated,  # that the ranks' shards make up the whole
                content_metadata=unshared(_CONTENT),
            )
        self._validated = True
        if mesh.rank == 0:
            write_facts(directory, facts)
        dist.barrier()
        return _files_of(mesh.rank, directory)


def _sharded_state(model: Model, optimizer: Optimizer, mesh: Mesh) -> dict[str, Any]:
    optimizer.allocate()
    content = _content(mesh)
    state = _sharded_model(model, content)
    state["optimizer"] = optimizer.megatron.sharded_state_dict(state, is_loading=False, metadata=content)
    state["schedule"] = optimizer.schedule.state_dict()
    state["rng"] = _sharded_rng(mesh)
    return state


@_nothing_to_collect()
def load_state(directory: str, model: Model, optimizer: Optimizer, mesh: Mesh, restore_rng: bool) -> None:
    """Continue from a saved state: weights, optimizer and schedule, and under the same layout the RNG. Collective."""
    optimizer.allocate()
    content = _content(mesh)
    state = _sharded_model(model, content)
    state["optimizer"] = optimizer.megatron.sharded_state_dict(state, is_loading=True, metadata=content)
    if restore_rng:
        state["rng"] = _sharded_rng(mesh)
    loaded = _load(state, directory)
    model.module.load_state_dict(loaded["model"])
    with _torch_adam_loads():
        optimizer.megatron.load_state_dict(loaded["optimizer"])
    optimizer.unshare_steps()
    optimizer.schedule.load_state_dict(loaded["schedule"])
    if restore_rng:
        rng.restore(loaded["rng"])


def load_weights(directory: str, model: Model, mesh: Mesh) -> None:
    """Load only the weights of a saved state; files that they do not need may be missing. Collective."""
    loaded = _load(_sharded_model(model, _content(mesh)), directory)
    model.module.load_state_dict(loaded["model"])


def _load(state: dict[str, Any], directory: str) -> dict[str, Any]:
    check_pickles(Path(directory))
    with quietly():
        return cast(dict[str, Any], dist_checkpointing.load(state, directory))


def _content(mesh: Mesh) -> dict[str, Any]:
    return {**_CONTENT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _sharded_model(model: Model, content: dict[str, Any]) -> dict[str, Any]:
    return {"model": model.module.sharded_state_dict(metadata=content)}  # pyright: ignore[reportCallIssue]


def _sharded_rng(mesh: Mesh) -> ShardedObject:
    return ShardedObject("rng", rng.capture(), (mesh.parallel.world_size,), (mesh.rank,), replica_id=0)


def _files_of(rank: int, directory: str) -> list[str]:
    """A rank's tensors are in `__<rank>_<n>.distcp`, those of the optimizer in `optimizer.__<rank>_<n>.distcp`.

    Rank 0 also writes what describes the whole.
    """
    names = sorted(path.name for path in Path(directory).iterdir())
    tensors = {name: name.removeprefix(OPTIMIZER_PREFIX) for name in names if name.endswith(".distcp")}
    shared = [name for name in names if name not in tensors] if rank == 0 else []
    return [name for name, plain in tensors.items() if plain.startswith(f"__{rank}_")] + shared


@contextlib.contextmanager
def _torch_adam_loads() -> Iterator[None]:
    """Make torch's AdamW state loadable, as that of Transformer Engine's FusedAdam is.

    DistributedOptimizer._set_main_param_and_optimizer_states looks up each entry of the optimizer's state, of torch's
    also `step`, which is stored with the parameter groups instead; and it copies into views of leaf parameters.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: DistributedOptimizer, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            original(self, model_param, {"step": None, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
