"""Killing a process of a run at a named point, and the points there are, for `ratchet prove-resume` and the fault
matrix only.

A folder says what is to happen and records what happened. Its files are only appended to, one write a line, so that a
process that is killed at once has still recorded it."""

import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from flows.views.history import evaluation_due, wanted_stages
from storage import kill_points, layout
from storage.errors import InputError
from storage.kill_points import Point
from tasks.config.run import RunConfig
from tasks.stages.names import Stage

FLOW, NODE = "flow", "node"
"""Victims that always exist: the process that drives the run, and the Ray node under its workers."""

_SPELLING = re.compile(r"(?P<stage>[a-z-]+)@(?P<iteration>\d+):(?P<point>[a-z-]+)(:(?P<victim>flow|node|\w+-\d+))?")
_PLANNED, _DELIVERED, _REACHED = "planned", "delivered", "reached.jsonl"

Processes = Callable[[], Mapping[str, int]]
"""Process ids of the run's processes by victim name: `trainer-0`, `engine-0`, `core-0`, `worker-0`, `node`, `judge-0`,
the engine that judges, and `environment-0`, the host of the environments of a rollout."""

_ENVIRONMENT = "environment"
_PLAYING = (Point.MID_RESPONSE, Point.MID_PART)  # of a rollout: the host of its environments is there


@dataclass(frozen=True)
class Fault:
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
    stage: Stage
    iteration: int
    point: Point
    process: int  # process id of the flow


class FaultFolder:
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

    def note(self, victim: str) -> None:
        """Record a kill from outside, at any moment after the newest point."""
        here = self.reached()[-1]
        fault = Fault(here.stage, here.iteration, here.point, victim)
        for name in (_DELIVERED, _PLANNED):  # a planned kill that was delivered is not delivered again
            self._append(name, str(fault))

    def observe(self, point: Point, key: str, processes: Processes) -> None:
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


def chosen(config: RunConfig, kills: int, seed: int, regenerate: bool) -> tuple[Fault, ...]:
    """Random points of a run, at most one per stage and iteration, in the order of work. With `regenerate` the run
    samples for itself, and so reaches the middle of a rollout's part. Raises InputError if there are fewer stages than
    kills."""
    cells: dict[tuple[int, Stage], list[Fault]] = {}
    for fault in possible(config, regenerate):
        if fault.point is Point.MID_RESPONSE:  # a run with short responses never reaches it
            continue
        cells.setdefault((fault.iteration, fault.stage), []).append(fault)
    if kills > len(cells):
        raise InputError(f"--kills {kills}: this run has {len(cells)} stages; raise --iterations or lower --kills")
    draw = random.Random(seed)
    places = sorted(draw.sample(range(len(cells)), kills))
    stages = list(cells.values())
    return tuple(draw.choice(stages[place]) for place in places)


def possible(config: RunConfig, regenerate: bool) -> Iterator[Fault]:
    """Every point at which the process to be killed is sure to exist, in the order of work."""
    for iteration in range(config.run.iterations + 1):
        for stage in wanted_stages(config, iteration):
            if stage == Stage.EVALUATE and not evaluation_due(iteration, config.run.iterations, config.evaluate.every):
                continue
            for point in _points(stage, stored=not regenerate):
                for victim in _victims(config, stage, point):
                    yield Fault(stage, iteration, point, victim)


def _points(stage: Stage, stored: bool) -> list[Point]:
    absent = {
        Point.MID_PART: stage == Stage.WEIGHT_SYNC or (stage == Stage.ROLLOUT and stored),
        Point.MID_RESPONSE: stage != Stage.ROLLOUT or stored,
        Point.UPLOAD: stage not in (Stage.TRAIN, Stage.PREPARE),
        Point.SENT: stage != Stage.WEIGHT_SYNC,
        Point.SERVED: stage != Stage.WEIGHT_SYNC,
    }
    return [point for point in Point if not absent.get(point, False)]


def _victims(config: RunConfig, stage: Stage, point: Point) -> list[str]:
    if stage in (Stage.PREPARE, Stage.REWARD) or point is Point.STARTED:
        return [FLOW, NODE]  # after a restart the workers may not exist yet
    workers = _workers(config)
    if stage is Stage.TRAIN:  # engines start beside it, or with `train.memory` after it
        late = ("engine-", "core-", "worker-") if config.train.memory.in_use else ("core-", "worker-")
        workers = [one for one in workers if not one.startswith(late)]
    if stage is not Stage.ROLLOUT or point not in _PLAYING:
        workers = [one for one in workers if not one.startswith(_ENVIRONMENT)]
    return [FLOW, NODE, *workers]


def _workers(config: RunConfig) -> list[str]:
    ranks = [f"trainer-{rank}" for rank in range(config.train.parallel.world_size)]
    engine = config.engine
    several = engine.tensor > 1
    cores = engine.count if several or engine.own_process else 0  # by default it depends on the machine
    workers = engine.count * engine.tensor if several else 0
    hosts = int(config.environment is not None)
    counts = {"engine": engine.count, "core": cores, "worker": workers, _ENVIRONMENT: hosts}
    return [*ranks, *(f"{kind}-{number}" for kind, count in counts.items() for number in range(count))]


def check(config: RunConfig, faults: Sequence[Fault], regenerate: bool) -> None:
    """Refuse points and victims that the run does not have. Raises InputError, which names the first of them."""
    there = {(fault.stage, fault.iteration, fault.point) for fault in possible(config, regenerate)}
    victims = (FLOW, NODE, *_workers(config), *(["judge-0"] if config.engines is not None else []))
    for fault in faults:
        if (fault.stage, fault.iteration, fault.point) not in there:
            why = " (with stored rollouts nothing is sampled: --regenerate)" if fault.stage == Stage.ROLLOUT else ""
            fact = f"this run of {config.run.iterations} iterations never reaches that point"
            raise InputError(f"--at {fault}: {fact}{why}")
        if fault.victim not in victims:
            raise InputError(f"--at {fault}: this run has no process {fault.victim!r}, only {', '.join(victims)}")
