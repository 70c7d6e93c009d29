"""Small workers in this process, for tests of stages and of the loop without kills."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.backends.root import Root
from storage.errors import WorkerLost
from tasks.config.run import RunConfig
from tasks.config.stored import ConfigRecord
from tasks.stages.context import RunContext
from tasks.workers.interface import EngineHandle, TrainerGroup
from tasks.workers.placement import Placement
from tests.small.workers import SmallEngine, SmallTrainer

_THREADS = ThreadPoolExecutor(256)  # more than calls are ever under way; a run makes hundreds, most of them short


class UnderWay:
    """A call in a thread of its own, as it has a process of its own elsewhere: the caller may do other things."""

    def __init__(self, call: Callable[[], list[Any]]) -> None:
        self._answer = _THREADS.submit(call)

    def wait(self, deadline_s: float) -> list[Any]:
        return self._answer.result(deadline_s)


class GroupHere:
    """Members that are called one after another."""

    def __init__(self, members: list[Any], watch: Callable[[str], None]) -> None:
        self.members, self._watch, self._alive = members, watch, True

    def submit(self, method: str, *arguments: Any, **options: Any) -> UnderWay:
        if not self._alive:
            raise WorkerLost("the group has ended; the next attempt starts a new one")
        self._watch(method)
        return UnderWay(lambda: [getattr(member, method)(*arguments, **options) for member in self.members])

    def alive(self) -> bool:
        return self._alive

    def processes(self) -> list[int]:
        return []

    def end(self) -> None:
        self._alive = False


PLACEMENT = Placement(device="cpu", engines=())


class WorkersHere:
    """Ranks and engines of a run, made on first use; `calls` has the methods that were called."""

    def __init__(
        self,
        config: RunConfig,
        engine: type[SmallEngine] = SmallEngine,
        trainer: type[SmallTrainer] = SmallTrainer,
        group: type[GroupHere] = GroupHere,
    ) -> None:
        self._config, self._engine, self._rank, self._group = config, engine, trainer, group
        self._trainers: TrainerGroup | None = None
        self._trained_under: Any = None
        self._engines: list[EngineHandle] = []
        self.ranks: list[SmallTrainer] = []
        self.calls: list[str] = []

    def expect(self) -> None:
        pass

    def warm(self, model_dir: Path, config: Any) -> None:
        pass

    def trainers(self, model_dir: Path, config: Any) -> TrainerGroup:
        if self._trainers is not None and config != self._trained_under:
            self._trainers.end()
        if self._trainers is None or not self._trainers.alive():
            self._trained_under = config
            self.ranks = [self._rank(str(model_dir), config, rank) for rank in range(config.parallel.world_size)]
            group = self._group(self.ranks, self.calls.append)
            self._trainers = TrainerGroup(group, self._config.workers, replaces=self._trainers is not None)
        return self._trainers

    def engines(self, model_dir: Path) -> list[EngineHandle]:
        missing = range(len(self._engines), self._config.engine.count)
        members = [self._engine(str(model_dir)) for _ in missing]
        for member in members:
            member.workers = self._config.engine.tensor
        made = [GroupHere([member], self.calls.append) for member in members]
        self._engines += [EngineHandle(group, self._config.workers) for group in made]
        return self._engines

    def judge(self, model_dir: Path) -> EngineHandle:
        raise AssertionError("these workers judge nothing")

    def placement(self) -> Placement:
        return PLACEMENT

    def processes(self) -> dict[str, int]:
        return {}


@contextmanager
def context_here(root: Root, config: RunConfig, scratch: Path, run: str = "small", **more: Any):
    """A context whose workers are in this process; at its end the block waits until everything is stored."""
    scratch.mkdir(parents=True, exist_ok=True)
    workers = more.pop("workers", None) or WorkersHere(config)
    context = RunContext(run, root, config, ConfigRecord.of(config).digest, workers, scratch, **more)
    with context.outbox:
        yield context
