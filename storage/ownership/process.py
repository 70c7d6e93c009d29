"""The process that drives a run, and whether it still lives as far as this machine can tell."""

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from pathlib import Path

from pydantic import BaseModel, ConfigDict

_PROC = Path("/proc")
_START_TIME = 19  # of the fields of /proc/PID/stat behind the name in parentheses; proc(5) calls it the 22nd of all


class Owner(BaseModel):
    """The process that drives a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """For people: the command, the flow run."""
    host: str
    """Name of the machine."""
    process: int
    """Process id there."""
    place: str | None = None
    """Boot and process namespace in which the process id means something; Linux alone."""
    birth: str | None = None
    """Start time of the process, which tells it from a later one with its id; Linux alone."""

    def __str__(self) -> str:
        return f"{self.name} (host {self.host}, process {self.process})"


class Life(Enum):
    """What this machine knows of a process."""

    ALIVE = auto()
    DEAD = auto()
    UNKNOWN = auto()


@dataclass(frozen=True)
class Clock:
    """The two clocks of a lease."""

    wall: Callable[[], datetime]
    """For people, and for processes of an earlier version: no process judges another machine's lease by it."""
    steady: Callable[[], float]
    """Seconds that nobody sets back and that go on while the machine sleeps: measures every period."""


def _steady() -> float:
    # Linux stops CLOCK_MONOTONIC in suspend, during which a lease runs out
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


SYSTEM = Clock(lambda: datetime.now(UTC), _steady)
"""The clocks of this machine."""


def this_process(name: str) -> Owner:
    """This process as the owner of what it does under `name`."""
    process = os.getpid()
    return Owner(name=name, host=socket.gethostname(), process=process, place=_place(), birth=_birth(process))


def life(owner: Owner) -> Life:
    """Whether the process of `owner` is running. Only its own machine, since its last start, can know."""
    if owner.place is None or owner.host != socket.gethostname() or owner.place != _place():
        return Life.UNKNOWN
    try:
        os.kill(owner.process, 0)
    except ProcessLookupError:
        return Life.DEAD
    except PermissionError:
        pass  # it is there, and another user's: /proc may hide it (mount option hidepid)
    seen = _birth(owner.process)
    return Life.ALIVE if None in (seen, owner.birth) or seen == owner.birth else Life.DEAD


def _place() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _birth(process: int) -> str | None:
    """Start time of a process; empty if it has ended and its parent has not asked for that, None if it is not seen."""
    try:
        state, *fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if state in "ZX" else fields[_START_TIME - 1]
