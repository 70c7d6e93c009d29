"""Processes that have done the imports of a role and wait for a place: of a start that is near, or of one that dies."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import ray

from tasks.workers.actors import fresh_names, living, spawn

Role = Literal["rank", "engine"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """A place of a rank or an engine. Processes that wait for equal ones can take each other's."""

    role: Role
    imports: Callable[..., object]  # does the imports of the role, with `arguments`
    arguments: tuple[Any, ...]
    environment: tuple[tuple[str, str], ...]
    """Variables of its process, with the cards that it sees."""
    host: str = ""
    """Ray's name of its host; none of ours has one."""
    seat: Mapping[str, Any] = field(default=MappingProxyType({}), compare=False)
    """Ray's options of its process. One that waits takes none of its resources."""


def waiting_label(role: Role) -> str:
    """Label of a process that waits for a place of that role."""
    return f"standby-{role}"


class Standby:
    """The processes of a run that wait."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._waiting: dict[tuple[Place, str], Any] = {}  # by place and name

    def fill(self, places: Iterable[Place]) -> None:
        """Start one for each place that none waits for, without waiting."""
        self._forget_dead()
        for place in (Counter(places) - Counter(place for place, _ in self._waiting)).elements():
            (name,) = fresh_names(f"{self._run}/{waiting_label(place.role)}", 1)
            beside = {option: value for option, value in place.seat.items() if not option.startswith("num_")}
            (actor,) = spawn([name], [dict(place.environment)], detached=False, seats=[beside])
            actor.make.remote(place.imports, place.arguments)
            self._waiting[place, name] = actor

    def take[K](self, places: Mapping[K, Place]) -> dict[K, Any]:
        """Hand over one for each of these places, as long as some that live wait for such a place."""
        self._forget_dead()
        return {key: self._waiting.pop(one) for key, one in fitting(self._waiting, places).items()}

    def _forget_dead(self) -> None:
        alive = living(self._waiting)
        for place, _ in self._waiting.keys() - alive.keys():
            logger.warning("%s died while it waited; another is started later", waiting_label(place.role))
        self._waiting = alive

    def end(self) -> None:
        """End them."""
        for actor in self._waiting.values():
            ray.kill(actor)
        self._waiting = {}


def fitting[K](waiting: Iterable[tuple[Place, str]], places: Mapping[K, Place]) -> dict[K, tuple[Place, str]]:
    """For each of these places one of those that wait for such a one, as long as there are some."""
    left, found = list(waiting), dict[K, tuple[Place, str]]()
    for key, place in places.items():
        if (one := next((one for one in left if one[0] == place), None)) is not None:
            left.remove(one)
            found[key] = one
    return found
