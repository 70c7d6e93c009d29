"""Processes, memory and disk of a run, estimated from the configuration."""

from collections.abc import Mapping

from pydantic import BaseModel

from tasks.config.run import RunConfig
from tasks.engine.protocol import KV_CACHE_BYTES_ON_CPU
from tasks.rewards.scoring import scoring_processes
from trainer_core.config import Device, Precision

_WEIGHT: Mapping[Precision, int] = {"fp32": 4, "bf16": 2}
_KV_CACHE_MIB = KV_CACHE_BYTES_ON_CPU >> 20  # the least: on a GPU it takes what is free
_GRADIENT = 4  # kept in fp32
_OPTIMIZER: Mapping[Precision, int] = {"fp32": 8, "bf16": 12}  # two moments, and fp32 weights if there are others


class Needs(BaseModel, frozen=True, extra="forbid"):
    """Processes, and bytes. Activations, and what libraries take for themselves, are not counted."""

    device: Device
    ranks: int
    """Trainer processes."""
    engines: int
    """Engine processes."""
    reward_processes: int
    """Scoring processes."""
    parameters: int
    """Weights of the model."""
    rank_bytes: int
    """Memory of one trainer rank: weights, gradients, optimizer, and the reference model if there is one."""
    engine_bytes: int
    """Memory of one engine: weights and key-value cache."""
    stored_bytes: int
    """Disk for what is stored once: model and prompts."""
    state_bytes: int
    """Disk for the train state of one iteration; one is in shared memory too while the run is driven."""
    states_kept: int
    """Train states kept at the end, by `[storage]`."""

    @property
    def disk_bytes(self) -> int:
        """Disk for the whole run, without samples."""
        return self.stored_bytes + self.state_bytes * self.states_kept


def needs_of(config: RunConfig, device: Device, parameters: int, prompt_bytes: int) -> Needs:
    """Estimate the resources of a run.

    Args:
        parameters: number of weights of the model.
        prompt_bytes: size of the tables of prompts.
    """
    weight, parallel = _WEIGHT[config.train.precision], config.train.parallel
    optimizer = _OPTIMIZER[config.train.precision]
    share = parameters / (parallel.tensor * parallel.pipeline)
    cache = config.engine.kv_cache_mib or _KV_CACHE_MIB
    held = weight + _GRADIENT + optimizer / parallel.replicas + (weight if config.train.policy.needs_reference else 0)
    return Needs(
        device=device,
        ranks=parallel.world_size,
        engines=config.engine.count,
        reward_processes=scoring_processes(config.reward),
        parameters=parameters,
        rank_bytes=round(share * held),
        engine_bytes=parameters * _WEIGHT[config.engine.precision] + (cache << 20),
        stored_bytes=parameters * weight + prompt_bytes,
        state_bytes=parameters * (weight + optimizer),
        states_kept=_states_kept(config),
    )


def _states_kept(config: RunConfig) -> int:
    """The states of iteration 0 and of the newest iterations, and every `keep_every`-th before those."""
    last, newest, every = config.run.iterations, config.storage.keep_newest, config.storage.keep_every
    if newest is None:
        return last + 1
    return sum(
        1 for number in range(last + 1) if number == 0 or number > last - newest or (every and number % every == 0)
    )
