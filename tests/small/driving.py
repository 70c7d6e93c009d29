"""Driving a run in this process over small workers: the real loop, from the end of the manifests."""

import io
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from flows.driving import Drive
from flows.views.history import IterationRecord
from flows.views.progress import Progress
from storage import kill_points, layout
from storage.backends.root import Root
from storage.kill_points import Point
from storage.manifest import need
from storage.ownership.lease import Lease, unlock
from storage.ownership.process import this_process
from storage.write_behind import WriteBehind
from tasks.config.run import RunConfig
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.views import Performed, View
from tests.small.here import WorkersHere

RUN = "small"
Done = tuple[int, Stage, bool]


def digests(root: Root, iterations: int) -> list[str]:
    """Identities of all rollouts, rewards and train states."""
    stages = (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN)
    return [need(root, RUN, number, stage).digest for number in range(1, iterations + 1) for stage in stages]


@dataclass
class Driver:
    """The driving done by one process."""

    root: Root
    config: RunConfig
    scratch: Path
    workers: WorkersHere
    run: str = RUN
    at: Callable[[RunContext, Point, str], None] | None = None
    """Called at each point of the run, with the key."""
    listener: Callable[[IterationRecord], object] | None = None
    """Called with each iteration that is complete."""
    done: list[Done] = field(default_factory=list)
    """Stages that ran, as (iteration, stage, reused)."""

    def drive(self) -> None:
        """Complete the run."""
        self._drive(one_stage=False)

    def redo(self) -> None:
        """Redo only the stage that was requested."""
        self._drive(one_stage=True)

    def _drive(self, one_stage: bool) -> None:
        progress = Progress(self.run, self.config.run.iterations, Console(file=io.StringIO()))

        if self.listener is not None:
            progress.on_finished(self.listener)

        @contextmanager
        def opener(lease: Lease, digest: str) -> Iterator[RunContext]:
            with WriteBehind() as outbox:
                context = RunContext(
                    self.run, self.root, self.config, digest, self.workers, self.scratch, lease, outbox, self._noted
                )
                with kill_points.observed(lambda point, key: self.at and self.at(context, point, key)):
                    yield context

        Drive(self.run, self.root, self.config, progress, opener).complete(one_stage)

    def _noted(self, stage: Stage, iteration: int, work: Callable[[], Performed], _inputs: tuple[View, ...]) -> View:
        performed = work()
        self.done.append((iteration, stage, performed.reused))
        return performed.view


def driver(root: Root, config: RunConfig, scratch: Path, **more) -> Driver:
    """Begin a new process: its workers hold nothing."""
    scratch.mkdir(parents=True, exist_ok=True)
    return Driver(root, config, scratch, more.pop("workers", None) or WorkersHere(config), **more)


class Killed(BaseException):
    """Ends the driving as a kill would, as far as one process can."""


def is_renewal() -> bool:
    """True in the thread that renews the lease, which would end alone."""
    return threading.current_thread().name.startswith("lease-")


def killing(stage: Stage, iteration: int, point: Point, after: int = 0):
    """End the driving at a point, after `after` others of the kind."""
    passed = [0]

    def at(_context: RunContext, here: Point, key: str) -> None:
        counts = here is not Point.MID_PART or layout.is_part(key)
        if here is point and counts and layout.place_of(key) == (iteration, stage):
            passed[0] += 1
            if passed[0] > after:
                raise Killed

    return at


def reach(
    root: Root,
    config: RunConfig,
    folder: Path,
    chance: random.Random,
    workers: Callable[[RunConfig], WorkersHere] = WorkersHere,
    most: int = 60,
) -> int:
    """Drive a run that is killed at random points, each after at most so many others, until it is complete; returns how
    often it was killed."""
    for killed in range(1000):
        left = chance.randint(1, most)

        def passed(*_: object) -> None:
            nonlocal left
            left -= not is_renewal()
            if not left:
                raise Killed

        try:
            with kill_points.observed(passed):
                driver(root, config, folder / f"{killed}", workers=workers(config)).drive()
        except Killed:
            unlock(root, RUN, this_process("tests"), force=True)
        else:
            return killed
    raise AssertionError("the run was never complete")
