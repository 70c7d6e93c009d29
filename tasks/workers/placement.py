"""Cards of the processes of a run, the transports of weights that they allow, and the memory that is held there."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from storage.errors import InputError
from tasks.config.environment import Settings
from tasks.config.model import JudgeEngine
from tasks.config.run import EngineSection, RunConfig, TransportChoice
from tasks.engine.protocol import KV_CACHE_BYTES_ON_CPU
from tasks.workers.peers import can_read
from trainer_core.config import Device, Precision
from trainer_core.frozen import Frozen
from trainer_core.weights.channel import Transport

_OF_A_RANK = 0.6
"""Share of a card that a rank takes for Ray where engines share it: more than half, so that no two ranks do."""
WEIGHT: Mapping[Precision, int] = {"fp32": 4, "bf16": 2}
OPTIMIZER: Mapping[Precision, int] = {"fp32": 8, "bf16": 12}  # two moments, and fp32 weights if there are others
_GRADIENT = 4  # kept in fp32
_GIB = 1 << 30


class Placement(Frozen):
    """Cards of trainer ranks and engines."""

    device: Device
    """On CPU no process has cards."""
    ranks: tuple[str, ...] = ()
    """The card of each trainer rank."""
    engines: tuple[tuple[str, ...], ...]
    """The cards of each engine, one for each of its workers."""
    one_host: bool = True
    """True if all cards are certainly those of one host; a Ray cluster that is attached to may have several."""
    apart: bool = False
    """True if flow, ranks and engines are on several hosts."""
    reads: bool | None = None
    """True if the engines' cards can read the memory of the trainer's cards; None if that is not known."""

    @property
    def one_card(self) -> bool:
        return self.device == "cuda" and len({*self.ranks, *self._workers}) == 1

    @property
    def own_cards(self) -> bool:
        """True if each process has a card of its own; NCCL refuses two processes of a group on one."""
        cards = [*self.ranks, *self._workers]
        return self.device == "cuda" and len(set(cards)) == len(cards)

    @property
    def shown(self) -> str:
        if self.apart:
            return "several hosts"
        if self.device == "cpu":
            return "CPU"
        if not self.ranks:
            return "the cards that Ray chooses"
        engines = "; ".join(",".join(cards) for cards in self.engines)
        return f"cards {','.join(self.ranks)} (trainer) and {engines} (engines)"

    @property
    def _workers(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.engines))


def placement(config: RunConfig, settings: Settings) -> Placement:
    """The cards of the processes of a run on this machine. Raises InputError: CUDA is requested but no card is visible;
    or an engine needs more cards than there are, or than the trainer leaves."""
    device, section = settings.device(config.device.kind), config.engine
    if device == "cpu" or not settings.local:  # Ray chooses cards of a cluster
        return Placement(device=device, engines=((),) * section.count, one_host=settings.local)
    ranks = settings.gpus[: config.train.parallel.world_size]
    cards = settings.gpus if section.cards == "shared" else _cards_of_engines(config, settings.gpus)
    engines = tuple(engine_cards(cards, place, section.tensor) for place in range(section.count))
    place = Placement(device=device, ranks=ranks, engines=engines)
    if place.one_card:
        return place
    return place.model_copy(update={"reads": can_read(_pairs(place, settings.gpus))})


def engines_repeat(config: RunConfig, settings: Settings) -> bool:
    """True if engines compute the same bits again from the same weights and samples; they are faster if they need not.
    Raises InputError: CUDA is requested but no card is visible."""
    return config.device.deterministic is True or settings.device(config.device.kind) == "cpu"


def bundles(config: RunConfig, device: Device) -> dict[str, list[dict[str, float]]]:
    """Bundles that Ray keeps on a cluster, each on one host: for the role `trainers` one for each tensor group, for
    `judge` one, and for `engines` one for each, unless they share the ranks' cards."""
    resource, parallel, section = "CPU" if device == "cpu" else "GPU", config.train.parallel, config.engine
    groups = parallel.world_size // parallel.tensor
    found = {"trainers": [{resource: float(parallel.tensor)}] * groups}
    if config.engines is not None:
        found["judge"] = [{resource: 1.0}]
    if config.retrain is not None:
        return found
    if device == "cpu" or section.cards == "own":
        return found | {"engines": [{resource: float(section.tensor)}] * section.count}
    if section.tensor > 1:
        fact = f"engine.tensor is {section.tensor} and engines share cards with the trainer"
        raise InputError(f'{fact}, which a Ray cluster cannot do: set engine.cards to "own", or engine.tensor to 1')
    return found


def taken(config: RunConfig, device: Device) -> dict[str, dict[str, float]]:
    """Resources that a process of each role takes of its bundle: two ranks never share a card."""
    resource = "CPU" if device == "cpu" else "GPU"
    rank, engine = 1.0, float(config.engine.tensor)
    if device == "cuda" and config.engine.cards == "shared":
        sharing = math.ceil(config.engine.count / config.train.parallel.world_size)
        rank, engine = _OF_A_RANK, math.floor((1 - _OF_A_RANK) / sharing * 1e4) / 1e4
    return {"trainers": {resource: rank}, "engines": {resource: engine}, "judge": {resource: 1.0}}


def card_of_judge(settings: Settings, device: Device) -> tuple[str, ...]:
    """The card of the engine that judges: the last visible one. Ray chooses it on a cluster."""
    return settings.gpus[-1:] if device == "cuda" and settings.local else ()


def engines_on_a_card(section: EngineSection, cards: int) -> int:
    """Engines on the card that most of them share, of that many visible cards."""
    return 1 if section.cards == "own" else math.ceil(section.count / max(1, cards // section.tensor))


def engine_cards(cards: tuple[str, ...], place: int, tensor: int) -> tuple[str, ...]:
    """The cards of engine number `place`: the next `tensor`, from the first again when there are no more. Raises
    InputError: one engine needs more cards than there are."""
    if tensor > len(cards):
        raise InputError(f"engine.tensor is {tensor}, but {len(cards)} GPUs are visible; choose a smaller one")
    first = place % (len(cards) // tensor) * tensor
    return cards[first : first + tensor]


def transport(wanted: TransportChoice, place: Placement) -> Transport:
    """The way of the weights: the fastest that was seen to work for such processes, unless one is asked for.
    `collective` is never taken by itself: NCCL connects again in every update. Raises InputError: what is asked for
    cannot work there."""
    if place.apart:
        if wanted not in ("auto", "files"):
            fact = f'sync.transport is "{wanted}", which needs all processes on one host, and Ray has them on several'
            raise InputError(f'{fact}: use "auto" or "files"')
        return "files"
    if wanted == "cuda":
        _check_cuda(place)
    if wanted == "collective" and place.device == "cuda" and place.one_host and not place.own_cards:
        fact = f'sync.transport is "collective", but NCCL needs a card for each process, and they are on {place.shown}'
        raise InputError(f'{fact}; use "auto", or engine.cards = "own"')
    if wanted != "auto":
        return wanted
    return "cuda" if place.one_card or (place.one_host and place.reads) else "memory"


def _cards_of_engines(config: RunConfig, cards: tuple[str, ...]) -> tuple[str, ...]:
    """The cards after the trainer's, if they are enough for a card each."""
    section, ranks = config.engine, config.train.parallel.world_size
    if (needed := ranks + section.count * section.tensor) > len(cards):
        raise InputError(
            f'engine.cards is "own", which needs {needed} GPUs: {ranks} for the trainer and {section.tensor} for each '
            f"of {section.count} engines, but {len(cards)} are visible ({','.join(cards)}). Make more visible "
            "(CUDA_VISIBLE_DEVICES), choose a smaller engine.count, engine.tensor or layout under [train.parallel], or "
            'set engine.cards to "shared"'
        )
    return cards[ranks:]


def _check_cuda(place: Placement) -> None:
    if place.one_card:
        return
    problem = None
    if place.device == "cpu":
        problem = "needs cards"
    elif not place.one_host:
        problem = (
            "over several cards needs all of them in one host, which is not certain for a Ray cluster (RAY_ADDRESS)"
        )
    elif place.reads is False:
        problem = "needs cards that can read each other's memory, which the driver denies"
    if problem is not None:
        fact = f'sync.transport is "cuda", which {problem}; trainer and engines are on {place.shown}'
        raise InputError(f'{fact}: use "auto" or "memory"')


def _pairs(place: Placement, cards: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Each card of an engine with each other card of the trainer, by their places among the visible ones."""
    readers = dict.fromkeys(itertools.chain.from_iterable(place.engines))
    pairs = itertools.product(readers, dict.fromkeys(place.ranks))
    return tuple((cards.index(reader), cards.index(owner)) for reader, owner in pairs if reader != owner)


class Parameters(NamedTuple):
    """Numbers of weights of the models of a run; 0 for one that it has not."""

    model: int
    teacher: int = 0
    critic: int = 0  # of a critic that does not begin with the policy
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


def engine_bytes(section: EngineSection | JudgeEngine, parameters: int, card: int | None = None) -> int:
    """Memory of one engine: weights, and the key-value cache, which on a card takes what is free if it is not given. Of
    a `card` with so many bytes it is then that of all engines that divide it."""
    if section.kv_cache_mib is None and card is not None:
        return round(section.gpu_memory_utilization * card)
    cache = KV_CACHE_BYTES_ON_CPU if section.kv_cache_mib is None else section.kv_cache_mib << 20
    return parameters * WEIGHT[section.precision] + cache


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
            one = engine_bytes(section, held.model // section.tensor, round(share * card_bytes))
            size = one if section.kv_cache_mib is None else one * workers[card]
            found.append(_Taken(size, f"engines with engine.{_limit(section)}"))
        if config.engines is not None and card in judge:
            asked = config.engines.judge
            size = engine_bytes(asked, held.judge, card_bytes)
            found.append(_Taken(size, f"the engine that judges with engines.judge.{_limit(asked)}"))
        if len(found) > 1 and sum(one.size for one in found) > card_bytes:
            raise InputError(_too_much(config.rollout.ahead * (card in place.ranks), card, found, card_bytes))


class _Taken(NamedTuple):
    """Memory that something takes of a card, in bytes."""

    size: int
    what: str


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
