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
    """Shared by all machines, as far as clocks are: judges whether another's lease has run out."""
    steady: Callable[[], float]
    """Seconds that nobody sets back and that go on while the machine sleeps: judges one's own."""


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
    return Life.ALIVE if _birth(owner.process) == owner.birth else Life.DEAD


def _place() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _birth(process: int) -> str | None:
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # a zombie has ended; it is only that nobody asked for its exit status yet
    return None if state in "ZX" else fields[_START_TIME - 1]
