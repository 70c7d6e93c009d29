"""A process that is frozen says nothing: who waits for it sees from outside that it does not run, and says so."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil
import ray
from ray.exceptions import RayError

from storage.errors import WorkerLost
from tasks.workers.connection import CONNECTION, on_host

LOOK_S = 20.0
"""Seconds between two looks. A process that lives runs a little, if only to look whether it stands still."""

_ANSWER_S = 10.0

logger = logging.getLogger(__name__)


class Where(NamedTuple):
    """A process: Ray's name of its host, the host's own, and its id there."""

    node: str
    host: str
    process: int


def here() -> Where:
    """This process."""
    return Where(ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid())


@dataclass(eq=False)
class Wait:
    """A wait for members of a group."""

    what: str
    ray: int  # number of the Ray that they run under
    members: Callable[[], Mapping[Where, str]]
    """Their names in messages; of those that have said where they are."""
    seen: dict[Where, float] = field(default_factory=dict)
    told: set[Where] = field(default_factory=set)


class Silence:
    """Looks, in a thread of its own, at the processes that this one waits for."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._waits: set[Wait] = set()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, wait: Wait) -> Iterator[None]:
        """Look at those members for the duration of a wait."""
        with self._turn:
            self._waits.add(wait)
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep, daemon=True, name="watch of others")
                self._thread.start()
        try:
            yield
        finally:
            with self._turn:
                self._waits.discard(wait)

    def look(self) -> None:
        """Compare the processor time of each process with that of the last look."""
        with self._turn:
            waits = list(self._waits)
        for wait in waits:
            try:
                self._compare(wait)
            except (WorkerLost, RayError):  # whoever waits is told
                continue

    def _compare(self, wait: Wait) -> None:
        members = CONNECTION.call(wait.ray, wait.members)
        for place, label in members.items():
            now = CONNECTION.call(wait.ray, _spent_there, place)
            if wait.seen.get(place) == now and place not in wait.told:
                wait.told.add(place)
                fact = f"{label} on host {place.host} stands still in {wait.what}: process {place.process}"
                repair = f"let it go on (kill -CONT {place.process}), or end it there, and it is replaced"
                self._say(f"{fact} has not run for {LOOK_S:.0f} s; {repair}")
            wait.seen[place] = now

    def _keep(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look()


def _spent(process: int) -> float:
    """Seconds of processor that a process of this host has used; -1 if it has ended."""
    try:
        times = psutil.Process(process).cpu_times()
    except psutil.NoSuchProcess:
        return -1.0
    return times.user + times.system


def _spent_there(place: Where) -> float:
    if place.node == ray.get_runtime_context().get_node_id():
        return _spent(place.process)
    return ray.get(on_host(place.node, ray.remote(_spent)).remote(place.process), timeout=_ANSWER_S)


SILENCE = Silence(logger.warning)
"""Silence of those that this process waits for."""
