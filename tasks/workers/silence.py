"""A process that is frozen says nothing: who waits for it sees from outside that it does not run, and says so."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil
from ray.exceptions import RayError

from storage.errors import WorkerLost
from tasks.workers.connection import CONNECTION
from tasks.workers.hosts import asked, this_node
from tasks.workers.stalls import stages

LOOK_S = 20.0
"""Seconds between two looks. A process that lives runs a little, if only to look whether it stands still."""

_ANSWER_S = 30.0  # a process that Ray begins there may have to import first

logger = logging.getLogger(__name__)


class Where(NamedTuple):
    """A process: Ray's name of its host, the host's own, and its id there."""

    node: str
    host: str
    process: int


def here() -> Where:
    """This process."""
    return Where(this_node(), socket.gethostname(), os.getpid())


@dataclass(eq=False)
class Wait:
    """A wait for members of a group."""

    what: str
    ray: int  # number of the Ray that they run under
    members: Callable[[], Mapping[Where, str]]
    """Their names in messages; of those that have said where they are."""
    seen: dict[Where, float | WorkerLost] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)


def spent_by(places: Set[Where]) -> dict[Where, float | WorkerLost]:
    """Seconds of processor that each process has used, or why its host does not say. All hosts are asked at once."""
    found: dict[Where, float | WorkerLost] = dict(CONNECTION.call(CONNECTION.number, _spent, places) if places else {})
    others = sorted({place.node for place in places - found.keys()})
    for node, answer in zip(others, asked(others, _spent, places, deadline_s=_ANSWER_S), strict=True):
        try:
            found |= answer()
        except WorkerLost as loss:
            found |= {place: loss for place in places if place.node == node}
    return found


def _spent(places: Set[Where]) -> dict[Where, float]:
    """The same on this host; -1 of a process that has ended."""
    found: dict[Where, float] = {}
    for place in (one for one in places if one.node == this_node()):
        try:
            found[place] = sum(psutil.Process(place.process).cpu_times()[:2])
        except psutil.NoSuchProcess:
            found[place] = -1.0
    return found


class Silence:
    """Looks, in a thread of its own, at the processes that this one waits for."""

    def __init__(
        self,
        say: Callable[[str], object],
        spent: Callable[[Set[Where]], Mapping[Where, float | WorkerLost]] = spent_by,
    ) -> None:
        self._say, self._spent = say, spent
        self._waits: set[Wait] = set()
        self._stopped: set[psutil.Process] = set()
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
        try:
            members = {wait: CONNECTION.call(wait.ray, wait.members) for wait in waits}
            spent = self._spent({place for of_wait in members.values() for place in of_wait})
        except (WorkerLost, RayError):  # whoever waits is told
            return
        for wait, of_wait in members.items():
            for place, label in of_wait.items():
                self._compare(wait, place, f"{label} on host {place.host}", spent[place])

    def look_below(self) -> None:
        """Find what this process has started, and a signal has stopped, such as processes that score."""
        stopped = {one for one in psutil.Process().children(recursive=True) if _is_stopped(one)}
        for one in stopped - self._stopped:
            who = f"process {one.pid} ({_named(one)}) on host {socket.gethostname()}"
            fact = f"{who} stands still in {stages() or 'between stages'}: a signal has stopped it"
            self._say(f"{fact}; let it go on (kill -CONT {one.pid}), or kill it")
        self._stopped = stopped

    def _compare(self, wait: Wait, place: Where, who: str, now: float | WorkerLost) -> None:
        said = ""
        if isinstance(now, WorkerLost):
            said = (f"{who} cannot be seen in {wait.what}: {now}; let Ray's processes and the network of that host go "
                    "on, or end Ray there (ray stop), and what it had is replaced")  # fmt: skip
        elif wait.seen.get(place) == now:
            said = (f"{who} stands still in {wait.what}: process {place.process} has not run for {LOOK_S:.0f} s; let "
                    f"it go on (kill -CONT {place.process}), or end it there, and it is replaced")  # fmt: skip
        if said not in ("", *wait.told):
            wait.told.add(said)
            self._say(said)
        wait.seen[place] = now

    def _keep(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look_below()
            self.look()


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:  # it has ended
        return False


def _named(process: psutil.Process) -> str:
    """The module of ours that it runs, or else its program: other words of its command may be secrets."""
    try:
        return next((word for word in process.cmdline() if word.startswith("tasks.")), process.name())
    except psutil.Error:
        return "which has ended"


SILENCE = Silence(logger.warning)
"""Silence of those that this process waits for."""
