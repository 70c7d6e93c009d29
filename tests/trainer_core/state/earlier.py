"""States as earlier versions wrote them: by megatron-core's own writer, with the optimizer gathered on every rank."""

import queue
from pathlib import Path

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from trainer_core.model import rng
from trainer_core.platform.platform import quietly
from trainer_core.state.facts import FACTS_FILE, StateFacts, facts_text

CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save_as_before(trainer, folder, apart=True):
    """Write the live state; `apart`: with the optimizer's tensors in files of their own."""
    model, optimizer, mesh = trainer._model, trainer._optimizer, trainer._mesh
    optimizer.allocate()
    Path(folder).mkdir(parents=True, exist_ok=True)
    content = {**CONTENT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": model.modules[0].sharded_state_dict(metadata=content)}
    state["optimizer"] = optimizer.megatron.sharded_state_dict(state, is_loading=False, metadata=content)
    state["schedule"] = optimizer.schedule.state_dict()
    state["rng"] = ShardedObject("rng", rng.capture(), (mesh.parallel.world_size,), (mesh.rank,), replica_id=0)
    # Megatron's own queue needs a process that imports everything again
    filesystem_async.get_write_results_queue = lambda mp_mode="spawn": queue.Queue()
    strategy = TorchDistSaveShardedStrategy(**({"separation_hint": "optimizer."} if apart else {}))
    with quietly():
        dist_checkpointing.save(state, str(folder), strategy, content_metadata=CONTENT)
    if mesh.rank == 0:
        facts = StateFacts(
            step=trainer._step, optimizer_updates=optimizer.updates, optimizer=optimizer.config, parallel=mesh.parallel,
            precision=trainer._config.precision, transformer_engine=False,
        )  # fmt: skip
        Path(folder, FACTS_FILE).write_text(facts_text(facts))
