"""Which cards the processes of a run compute on, and what that means for the way of weights between them."""

import itertools

from storage.errors import InputError
from tasks.config.environment import Settings
from tasks.config.run import RunConfig, TransportChoice
from trainer_core.config import Device
from trainer_core.frozen import Frozen
from trainer_core.weights.channel import Transport


class Placement(Frozen):
    """Where trainer ranks and engines compute."""

    device: Device
    """On CPU no process has cards."""
    ranks: tuple[str, ...] = ()
    """The card of each trainer rank."""
    engines: tuple[tuple[str, ...], ...]
    """The cards of each engine, one for each of its workers."""

    @property
    def one_card(self) -> bool:
        """Whether all of them share a card."""
        return self.device == "cuda" and len({*self.ranks, *self._workers}) == 1

    @property
    def own_cards(self) -> bool:
        """Whether each process has a card of its own; NCCL refuses two processes of a group on one."""
        cards = [*self.ranks, *self._workers]
        return self.device == "cuda" and len(set(cards)) == len(cards)

    @property
    def _workers(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.engines))


def placement(config: RunConfig, settings: Settings) -> Placement:
    """Where the processes of a run compute on this machine.

    Raises:
        InputError: CUDA is requested but no card is visible; or an engine needs more cards than there are.
    """
    device, section = settings.device(config.device.kind), config.engine
    if device == "cpu":
        return Placement(device=device, engines=((),) * section.count)
    engines = tuple(engine_cards(settings.gpus, place, section.tensor) for place in range(section.count))
    return Placement(device=device, ranks=settings.gpus[: config.train.parallel.world_size], engines=engines)


def engine_cards(cards: tuple[str, ...], place: int, tensor: int) -> tuple[str, ...]:
    """The cards of engine number `place`: the next `tensor`, from the first again when there are no more.

    Raises:
        InputError: one engine needs more cards than there are.
    """
    if tensor > len(cards):
        raise InputError(f"engine.tensor is {tensor}, but {len(cards)} GPUs are visible; choose a smaller one")
    first = place % (len(cards) // tensor) * tensor
    return cards[first : first + tensor]


def transport(wanted: TransportChoice, place: Placement) -> Transport:
    """The way of the weights: the fastest that works for these processes, unless one is asked for.

    Raises:
        InputError: what is asked for cannot work there.
    """
    if wanted == "cuda" and not place.one_card:
        raise InputError(
            f'sync.transport is "cuda", which needs all trainer ranks and engines on one card, but they are on '
            f'{_shown(place)}; use "auto"'
        )
    if wanted == "collective" and place.device == "cuda" and not place.own_cards:
        raise InputError(
            f'sync.transport is "collective", but NCCL needs a card for each process, and they are on '
            f'{_shown(place)}; use "auto"'
        )
    if wanted != "auto":
        return wanted
    if place.one_card:
        return "cuda"
    return "collective" if place.own_cards else "memory"


def _shown(place: Placement) -> str:
    if place.device == "cpu":
        return "CPU"
    engines = "; ".join(",".join(cards) for cards in place.engines)
    return f"cards {','.join(place.ranks)} (trainer) and {engines} (engines)"
