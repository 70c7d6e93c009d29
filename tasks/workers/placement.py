"""Cards of the processes of a run, and the transports of weights that they allow."""

import itertools
import math

from storage.errors import InputError
from tasks.config.environment import Settings
from tasks.config.run import EngineSection, RunConfig, TransportChoice
from tasks.workers.peers import can_read
from trainer_core.config import Device
from trainer_core.frozen import Frozen
from trainer_core.weights.channel import Transport


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
    reads: bool | None = None
    """True if the engines' cards can read the memory of the trainer's cards; None if that is not known."""

    @property
    def one_card(self) -> bool:
        """True if all of them share a card."""
        return self.device == "cuda" and len({*self.ranks, *self._workers}) == 1

    @property
    def own_cards(self) -> bool:
        """True if each process has a card of its own; NCCL refuses two processes of a group on one."""
        cards = [*self.ranks, *self._workers]
        return self.device == "cuda" and len(set(cards)) == len(cards)

    @property
    def shown(self) -> str:
        """For a message."""
        if self.device == "cpu":
            return "CPU"
        engines = "; ".join(",".join(cards) for cards in self.engines)
        return f"cards {','.join(self.ranks)} (trainer) and {engines} (engines)"

    @property
    def _workers(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.engines))


def placement(config: RunConfig, settings: Settings) -> Placement:
    """The cards of the processes of a run on this machine. Raises InputError: CUDA is requested but no card is visible;
    or an engine needs more cards than there are, or than the trainer leaves."""
    device, section = settings.device(config.device.kind), config.engine
    if device == "cpu":
        return Placement(device=device, engines=((),) * section.count)
    ranks = settings.gpus[: config.train.parallel.world_size]
    cards = settings.gpus if section.cards == "shared" else _cards_of_engines(config, settings.gpus)
    engines = tuple(engine_cards(cards, place, section.tensor) for place in range(section.count))
    place = Placement(device=device, ranks=ranks, engines=engines, one_host=settings.local)
    if place.one_card or not place.one_host:
        return place
    return place.model_copy(update={"reads": can_read(_pairs(place, settings.gpus))})


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
    if wanted == "cuda":
        _check_cuda(place)
    if wanted == "collective" and place.device == "cuda" and not place.own_cards:
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
