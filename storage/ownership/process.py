"""The process that drives a run, and whether it is alive as far as this machine can tell."""

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from pathlib import Path

from pydantic import BaseModel

_PROC = Path("/proc")
_START_TIME = 19  # among the fields of /proc/PID/stat after the name in parentheses; proc(5) counts it as field 22


class Owner(BaseModel, frozen=True, extra="forbid"):
    name: str  # for people: the command, the flow run
    host: str  # name of the machine
    process: int  # process id there
    place: str | None = None  # boot and process namespace in which the process id is valid; only on Linux
    birth: str | None = None
    """Start time of the process, which distinguishes it from a later one with the same id; only on Linux."""

    def __str__(self) -> str:
        return f"{self.name} (host {self.host}, process {self.process})"


class Life(Enum):
    ALIVE = auto()
    DEAD = auto()
    UNKNOWN = auto()


@dataclass(frozen=True)
class Clock:
    wall: Callable[[], datetime]  # for display: no process judges another machine's lease by it
    steady: Callable[[], float]
    """Seconds that are never set back and continue while the machine sleeps; measures every period."""


SYSTEM = Clock(
    lambda: datetime.now(UTC),
    # Linux stops CLOCK_MONOTONIC in suspend, during which a lease runs out
    lambda: time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic(),
)
"""The clocks of this machine."""


def this_process(name: str) -> Owner:
    process = os.getpid()
    return Owner(name=name, host=socket.gethostname(), process=process, place=_place(), birth=_birth(process))


def born(process: int) -> str | None:
    """Boot and start time of a process of this machine, which a clock that is set does not change; None for a process
    that has ended or is not visible."""
    birth = _birth(process)
    return f"{_place()} {birth}" if birth else None


def life(owner: Owner) -> Life:
    """True if the process of `owner` is running. Only its own machine can know, and only since its last boot."""
    if owner.place is None or owner.host != socket.gethostname() or owner.place != _place():
        return Life.UNKNOWN
    try:
        os.kill(owner.process, 0)
    except ProcessLookupError:
        return Life.DEAD
    except PermissionError:
        pass  # it exists and is another user's: /proc may hide it (mount option hidepid)
    seen = _birth(owner.process)
    return Life.ALIVE if None in (seen, owner.birth) or seen == owner.birth else Life.DEAD


def is_stopped(owner: Owner) -> bool:
    """True if a living process of this machine does nothing until it is continued: SIGSTOP, Ctrl-Z or a debugger."""
    return _stat(owner.process)[:1] in (["T"], ["t"])


def _place() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _birth(process: int) -> str | None:
    """Start time of a process; empty for a zombie, None if the process is not visible."""
    if not (fields := _stat(process)):
        return None
    return "" if fields[0] in "ZX" else fields[_START_TIME]


def _stat(process: int) -> list[str]:
    """State of a process and the fields that follow it; none if the process is not visible."""
    try:
        return (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
