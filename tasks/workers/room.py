"""Memory that trainer ranks and engines hold, without activations, and the room for them on a card."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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


class Parameters(NamedTuple):
    """Numbers of weights of the models of a run; 0 for one that it has not."""

    model: int
    teacher: int = 0
    critic: int = 0
    """Of a critic that does not begin with the policy."""
    judge: int = 0


def trained(config: RunConfig, held: Parameters) -> int:
    """Number of weights that are trained: the model's, and a critic's."""
    return held.model + (0 if config.train.critic is None else held.critic or held.model)


def rank_bytes(config: RunConfig, held: Parameters) -> int:
    """Memory of a trainer rank: weights, gradients and optimizer of the model, and of a critic; the reference model if
    there is one; and the weights of a teacher. Experts count as if each rank had all of them."""
    weight, parallel = WEIGHT[config.train.precision], config.train.parallel
    each = weight + _GRADIENT + OPTIMIZER[config.train.precision] / parallel.replicas
    frozen = held.teacher + (held.model if config.train.policy.needs_reference else 0)
    return round((trained(config, held) * each + frozen * weight) / (parallel.tensor * parallel.pipeline))


def engine_bytes(section: EngineSection | JudgeEngine, parameters: int) -> int:
    """Memory of one engine: weights, and the key-value cache, which on a card takes what is free if it is not given."""
    mib = section.kv_cache_mib
    return parameters * WEIGHT[section.precision] + (KV_CACHE_BYTES_ON_CPU if mib is None else mib << 20)


def check_room(config: RunConfig, held: Parameters, place: Placement, judge: tuple[str, ...], card_bytes: int) -> None:
    """Refuse a card with more than it can hold at once of: a rank, if rollouts run beside its training; engines that do
    not sleep; and the engine that judges, whose cards are `judge`. Raises InputError."""
    workers, section = Counter(card for cards in place.engines for card in cards), config.engine
    for card in dict.fromkeys([*place.ranks, *judge]):
        found = list[_Taken]()
        if config.rollout.ahead and card in place.ranks:
            at_least = rank_bytes(config, held) // config.train.parallel.expert
            found.append(_Taken(at_least, "a rank"))
        if workers[card] and not section.sleep:
            share = workers[card] / max(workers.values())
            one = _engine_on_card(section, held.model // section.tensor, round(share * card_bytes))
            size = one if section.kv_cache_mib is None else one * workers[card]
            found.append(_Taken(size, f"engines with engine.{_limit(section)}"))
        if config.engines is not None and card in judge:
            asked = config.engines.judge
            size = _engine_on_card(asked, held.judge, card_bytes)
            found.append(_Taken(size, f"the engine that judges with engines.judge.{_limit(asked)}"))
        if len(found) > 1 and sum(one.size for one in found) > card_bytes:
            raise InputError(_too_much(config.rollout.ahead * (card in place.ranks), card, found, card_bytes))


class _Taken(NamedTuple):
    """Memory that something takes of a card, in bytes."""

    size: int
    what: str


def _engine_on_card(section: EngineSection | JudgeEngine, parameters: int, card_bytes: int) -> int:
    """Memory of one engine; without a size of its key-value cache that of all engines that divide the card."""
    if section.kv_cache_mib is None:
        return round(section.gpu_memory_utilization * card_bytes)
    return parameters * WEIGHT[section.precision] + (section.kv_cache_mib << 20)


def _limit(section: EngineSection | JudgeEngine) -> str:
    """The setting that decides the memory of an engine, with its value."""
    name = "gpu_memory_utilization" if section.kv_cache_mib is None else "kv_cache_mib"
    return f"{name} = {dict(section)[name]}"


def _too_much(ahead: int, card: str, found: Sequence[_Taken], card_bytes: int) -> str:
    taken = ", ".join(f"{one.size / _GIB:.1f} GiB for {one.what}" for one in found)
    before = f"rollout.ahead = {ahead} lets engines sample while the trainer trains, and " if ahead else ""
    repair = 'give engines cards of their own (engine.cards = "own"), or set rollout.ahead to 0'
    return (
        f"{before}card {card} of {card_bytes / _GIB:.1f} GiB cannot hold at once what it would have: without "
        f"activations {taken}. Lower a setting, {repair if ahead else 'or make more cards visible'}"
    )
