"""Trainer and engines take turns on a device: what the trainer gives up while the engines sample, by `train.memory`."""

import time
from collections.abc import Iterable

from tasks.stages.context import RunContext
from tasks.workers.trainers import TrainerGroup
from trainer_core.config import MemoryConfig


def release(context: RunContext, group: TrainerGroup, weights: bool = True) -> dict[str, float]:
    """Let the ranks release what the configuration names; returns metrics, none if it names nothing.

    A state that was saved is in files by then, whether or not it is stored, so that nothing reads what is given up.

    Args:
        weights: whether the weights are among it; not while they are still to be exported.
    """
    memory = context.config.train.memory
    if not weights:
        memory = memory.model_copy(update={"offload_parameters": False})
    return {} if not memory.in_use else _released(group, memory)


def resume(context: RunContext, group: TrainerGroup) -> dict[str, float]:
    """Let the ranks take everything back; returns metrics, none if the configuration lets them give up nothing.

    What they gave up under an earlier configuration comes back without being asked for, when it is needed.
    """
    if not context.config.train.memory.in_use:
        return {}
    clock = time.perf_counter()
    group.resume()
    return {"resume_seconds": time.perf_counter() - clock}


def summed(metrics: Iterable[dict[str, float]]) -> dict[str, float]:
    """The sums of what `release` has returned several times."""
    pairs = [pair for one in metrics for pair in one.items()]
    return {name: sum(value for other, value in pairs if other == name) for name, _ in pairs}


def _released(group: TrainerGroup, memory: MemoryConfig) -> dict[str, float]:
    clock = time.perf_counter()
    given_up = group.release(memory)
    return {"released_bytes": float(given_up), "release_seconds": time.perf_counter() - clock}
