"""Killing a process of a run at a named point, for `ratchet prove-resume` and the fault matrix only.

A folder says what is to happen and records what happened. Its files are only appended to, one write a line, so that a
process that is killed at once has still recorded it.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from storage import kill_points, layout
from storage.errors import InputError
from storage.kill_points import Point
from tasks.stages.names import Stage

FLOW, NODE = "flow", "node"
"""Victims that always exist: the process that drives the run, and the Ray node under its workers."""

_SPELLING = re.compile(r"(?P<stage>[a-z-]+)@(?P<iteration>\d+):(?P<point>[a-z-]+)(:(?P<victim>flow|node|\w+-\d+))?")
_PLANNED, _DELIVERED, _REACHED = "planned", "delivered", "reached.jsonl"

Processes = Callable[[], Mapping[str, int]]
"""Process ids of the run's processes by victim name: `trainer-0`, `engine-0`, `core-0`, `worker-0`, `node`, and
`environment-0`, the host of the environments of a rollout."""


@dataclass(frozen=True)
class Fault:
    """One kill."""

    stage: Stage
    iteration: int
    point: Point
    victim: str = FLOW
    """`flow`, `node`, `trainer-RANK`, `engine-NUMBER`, `environment-0`, or of the processes that vLLM starts for an
    engine `core-NUMBER` (its scheduler) or `worker-NUMBER` (counted over all engines)."""

    def __str__(self) -> str:
        return f"{self.stage}@{self.iteration}:{self.point}:{self.victim}"

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Read `STAGE@ITERATION:POINT[:VICTIM]`, such as `train@2:parts-done:trainer-1`. Raises InputError for another
        form."""
        found = _SPELLING.fullmatch(text)
        stages, names = [stage.value for stage in Stage], [point.value for point in Point]
        if found is None or found["stage"] not in stages or found["point"] not in names:
            form = f"STAGE@ITERATION:POINT[:VICTIM] with a stage of {', '.join(stages)}, a point of {', '.join(names)}"
            fact = f"{text!r} names no point of a run"
            raise InputError(f"{fact}: write {form} and a victim such as flow, node, trainer-0")
        victim = found["victim"] or FLOW
        return cls(Stage(found["stage"]), int(found["iteration"]), Point(found["point"]), victim)


class Reached(BaseModel, frozen=True, extra="forbid"):
    """A point that a process of the run reached."""

    stage: Stage
    iteration: int
    point: Point
    process: int
    """Process id of the flow."""


class FaultFolder:
    """Planned and delivered kills of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def plan(self, faults: list[Fault]) -> None:
        """Record what is to happen; the folder must be empty."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / _PLANNED).write_text("".join(f"{fault}\n" for fault in faults), encoding="utf-8")

    def planned(self) -> list[Fault]:
        return [Fault.parse(line) for line in self._lines(_PLANNED)]

    def delivered(self) -> list[Fault]:
        return [Fault.parse(line) for line in self._lines(_DELIVERED)]

    def reached(self) -> list[Reached]:
        return [Reached.model_validate_json(line) for line in self._lines(_REACHED)]

    def observe(self, point: Point, key: str, processes: Processes) -> None:
        """Record a point, and deliver the kills planned there."""
        place = layout.place_of(key)
        if place is None or (point is Point.MID_PART and not layout.is_part(key)):
            return
        iteration, stage = place
        here = Reached(stage=Stage(stage), iteration=iteration, point=point, process=os.getpid())
        self._append(_REACHED, here.model_dump_json())
        delivered = self.delivered()
        for fault in self.planned():
            at = (fault.stage, fault.iteration, fault.point) == (stage, iteration, point)
            if at and fault not in delivered:
                self._deliver(fault, processes)

    def _deliver(self, fault: Fault, processes: Processes) -> None:
        process = os.getpid() if fault.victim == FLOW else processes().get(fault.victim)
        if process is None or not self._claim(fault):
            return
        self._append(_DELIVERED, str(fault))
        os.kill(process, signal.SIGKILL)

    def _claim(self, fault: Fault) -> bool:
        """Claim a kill for this thread; False if another one has it, as several may reach a point at once."""
        try:
            (self.path / f"claimed {fault}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _append(self, name: str, line: str) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def _lines(self, name: str) -> list[str]:
        path = self.path / name
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@contextmanager
def injected(folder: Path | None, processes: Processes) -> Iterator[None]:
    """Inside the block, do what the folder says; nothing without a folder."""
    if folder is None:
        yield
        return
    faults = FaultFolder(folder)
    with kill_points.observed(lambda point, key: faults.observe(point, key, processes)):
        yield
