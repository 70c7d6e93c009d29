"""Memory that trainer ranks and engines hold, without activations, and the room for both on a card."""

from collections import Counter
from collections.abc import Mapping

from storage.errors import InputError
from tasks.config.engines import JudgeEngine
from tasks.config.run import EngineSection, RunConfig
from tasks.engine.protocol import KV_CACHE_BYTES_ON_CPU
from tasks.workers.placement import Placement
from trainer_core.config import Precision

WEIGHT: Mapping[Precision, int] = {"fp32": 4, "bf16": 2}
OPTIMIZER: Mapping[Precision, int] = {"fp32": 8, "bf16": 12}  # two moments, and fp32 weights if there are others
_GRADIENT = 4  # kept in fp32
_GIB = 1 << 30


def rank_bytes(config: RunConfig, parameters: int, teacher: int = 0, critic: int = 0) -> int:
    """Memory of a trainer rank: weights, gradients and optimizer of the model, and of a critic, with as many parameters
    unless it has `critic` of them; the reference model if there is one; and the weights of a teacher, which has
    `teacher` parameters. Experts count as if each rank had all of them."""
    weight, parallel = WEIGHT[config.train.precision], config.train.parallel
    trained = weight + _GRADIENT + OPTIMIZER[config.train.precision] / parallel.replicas
    learning = parameters + (0 if config.train.critic is None else critic or parameters)
    held = teacher + (parameters if config.train.policy.needs_reference else 0)
    return round((learning * trained + held * weight) / (parallel.tensor * parallel.pipeline))


def engine_bytes(section: EngineSection | JudgeEngine, parameters: int) -> int:
    """Memory of one engine: weights, and the key-value cache, which on a card takes what is free if it is not given."""
    mib = section.kv_cache_mib
    return parameters * WEIGHT[section.precision] + (KV_CACHE_BYTES_ON_CPU if mib is None else mib << 20)


def check_room(
    config: RunConfig, parameters: int, teacher: int, critic: int, place: Placement, card_bytes: int
) -> None:
    """Refuse rollouts beside a training on cards that cannot hold a rank and engines at once; parameters as
    `rank_bytes`. Raises InputError."""
    workers = Counter(card for cards in place.engines for card in cards)
    shared = [card for card in place.ranks if card in workers]
    if not shared:
        return
    section, most = config.engine, max(workers[card] for card in shared)
    setting = "gpu_memory_utilization" if section.kv_cache_mib is None else "kv_cache_mib"
    of_engines = round(section.gpu_memory_utilization * card_bytes)
    if section.kv_cache_mib is not None:
        weights = parameters * WEIGHT[section.precision] // section.tensor
        of_engines = most * (weights + (section.kv_cache_mib << 20))
    of_rank = rank_bytes(config, parameters, teacher, critic) // config.train.parallel.expert  # at least
    if of_rank + of_engines <= card_bytes:
        return
    raise InputError(
        f"rollout.ahead = {config.rollout.ahead} lets engines sample while the trainer trains, and card {shared[0]} of "
        f"{card_bytes / _GIB:.1f} GiB cannot hold both: without activations a rank takes {of_rank / _GIB:.1f} GiB and "
        f"engines {of_engines / _GIB:.1f} GiB, with engine.{setting} = {section.model_dump()[setting]}. Lower that, "
        'give engines cards of their own (engine.cards = "own"), or set rollout.ahead to 0'
    )
