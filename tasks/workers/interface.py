"""Processes that compute, as stages use them: behind typed calls with a deadline, in groups that work in step."""

import functools
import inspect
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Protocol, Self, cast

import numpy as np
import psutil
from numpy.typing import NDArray

from tasks.config.run import WorkersSection
from tasks.engine.protocol import Collected, EngineProtocol, TokenIds, ValuesProtocol
from tasks.workers.placement import Placement
from trainer_core.config import MemoryConfig, TrainerConfig
from trainer_core.protocol import SavedFiles, TrainerProtocol


class Pending[R](Protocol):
    """A call that was sent and whose results have not been requested yet."""

    def wait(self, deadline_s: float) -> R:
        """The results. Raises WorkerLost (a member died, failed with an error that is not ours, or did not answer
        within the deadline; the group is ended) or RatchetError (what all members raised)."""
        ...


class Group(Protocol):
    """Processes that work in step: every call goes to all of them, and they are dead as soon as one of them is."""

    def submit(self, method: str, *arguments: Any, **options: Any) -> Pending[list[Any]]:
        """Call a method on every member with the same arguments, without waiting; one result per member. Raises
        WorkerLost: the group has ended."""
        ...

    def alive(self) -> bool:
        """True if no member is known to be dead. A group with a dead member is ended."""
        ...

    def processes(self) -> list[int]:
        """Process ids of the members."""
        ...

    def end(self) -> None:
        """End the members' processes."""


class GroupHandle:
    """A `Group` behind the typed calls of its members' protocol. A call raises what the members raise, or WorkerLost. A
    subclass names that protocol twice: as a base, which gives the types, and as `forwards`. Each method of it that the
    subclass does not define goes to all members, waits for them, and returns the answer of the first."""

    def __init_subclass__(cls, forwards: type | None = None) -> None:
        super().__init_subclass__()
        for name, method in {} if forwards is None else vars(forwards).items():
            if inspect.isfunction(method) and not name.startswith("_") and name not in vars(cls):
                setattr(cls, name, _forwarded(method))

    def __init__(self, group: Group, deadlines: WorkersSection, replaces: bool = False) -> None:
        """With `replaces` the members take the place of others that this process had started."""
        self._group, self.deadlines = group, deadlines
        self.awaited = False  # True if it was waited for since it was started
        self.began = time.time() if replaces else psutil.Process().create_time()
        """Since when it is waited for, in seconds since the epoch: the first since this process exists."""

    @classmethod
    def of(cls, group: Group, deadlines: WorkersSection, replaces: bool = False) -> Self:
        """A handle; a type checker cannot see that `forwards` implements the protocol, and refuses `cls` by name."""
        return cls(group, deadlines, replaces)

    def submit[**P, R](
        self, method: Callable[Concatenate[Any, P], R], *arguments: P.args, **options: P.kwargs
    ) -> Pending[list[R]]:
        """Begin a call of a method of the members' protocol, such as one side of a transfer; one result per member."""
        return cast(Pending[list[R]], self._group.submit(method.__name__, *arguments, **options))

    def alive(self) -> bool:
        return self._group.alive()

    def end(self) -> None:
        self._group.end()

    def processes(self) -> list[int]:
        return self._group.processes()

    def results[R](self, pending: Pending[list[R]]) -> list[R]:
        """The answers of all members to a call that was begun."""
        return pending.wait(self.deadlines.call_deadline_s)


def _forwarded[**P, R](method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[GroupHandle, P], R]:
    def forward(handle: GroupHandle, *arguments: P.args, **options: P.kwargs) -> R:
        return handle.results(handle.submit(method, *arguments, **options))[0]

    return functools.update_wrapper(forward, method)


class TrainerGroup(GroupHandle, TrainerProtocol, forwards=TrainerProtocol):
    """All trainer ranks. Every call goes to every rank and raises what `Trainer` raises, or WorkerLost. It returns the
    answer of the first rank, where that of all is not said below. For `plan_weights` and `send_weights`, to which each
    rank has its own answer, use `submit` and `results`."""

    def identity(self) -> str | None:
        """Identity of the committed state that all ranks hold; None if they hold none, or different ones."""
        return _common(self.results(self.submit(TrainerProtocol.identity)))

    def reference(self) -> str | None:
        """Identity of the reference that all ranks hold, or None."""
        return _common(self.results(self.submit(TrainerProtocol.reference)))

    def save(self, directory: Path) -> SavedFiles:
        """`TrainerProtocol.save`; the names of all ranks' files, sorted."""
        ranks = self.results(self.submit(TrainerProtocol.save, directory))
        of_ranks = tuple(rank.names for rank in ranks)
        return SavedFiles(tuple(sorted({name for names in of_ranks for name in names})), ranks[0].identity, of_ranks)

    def release(self, memory: MemoryConfig) -> int:
        """`TrainerProtocol.release`; the bytes of all ranks together."""
        return sum(self.results(self.submit(TrainerProtocol.release, memory)))


def _common[R](values: Sequence[R]) -> R | None:
    return values[0] if len(set(values)) == 1 else None


class EngineHandle(GroupHandle, EngineProtocol, forwards=EngineProtocol):
    """An engine in another process. Every method waits for it and raises what `Engine` raises, or WorkerLost."""

    def collect(self, wait_s: float) -> Collected:
        """`EngineProtocol.collect`; an engine that does not finish a step in time has failed."""
        (collected,) = self.submit(EngineProtocol.collect, wait_s).wait(self.deadlines.step_deadline_s)
        return collected

    def values(self, sequences: Sequence[TokenIds]) -> NDArray[np.float32]:
        """`ValuesProtocol.values`, of an engine whose model is a classifier; it has no other method."""
        return self.results(self.submit(ValuesProtocol.values, sequences))[0]


def inside(process: int, place: int, tensor: int) -> Iterator[tuple[str, int]]:
    """Process ids of what the engine at that place has started: its scheduler `core-PLACE`, if that is apart, and the
    workers of a `tensor` above 1, `worker-NUMBER`, counted over all engines."""
    try:
        titles = {one.pid: " ".join(one.cmdline()) for one in psutil.Process(process).children(recursive=True)}
    except psutil.Error:  # it has just ended
        return
    for started, title in titles.items():
        if "VLLM::EngineCore" in title:
            yield f"core-{place}", started
        elif found := re.search(r"VLLM::Worker_TP(\d+)", title):
            yield f"worker-{place * tensor + int(found[1])}", started


class Workers(Protocol):
    """The trainer ranks and engines of one run, started when first needed and replaced when they have died."""

    def expect(self) -> None:
        """Begin with what starts need beside their arguments, without waiting: all will be asked for soon."""

    def warm(self, model_dir: Path, config: TrainerConfig) -> None:
        """Start whatever is missing, all at once, without waiting."""

    def trainers(self, model_dir: Path, config: TrainerConfig) -> TrainerGroup:
        """The run's trainer ranks. A group that is new or was restarted holds no weights; check its identity. Raises
        WorkerLost: what they run under has died since it was started."""
        ...

    def engines(self, model_dir: Path) -> list[EngineHandle]:
        """The run's engines. One that is new or was restarted holds the weights in `model_dir`; check its identity.
        Raises WorkerLost: what they run under has died since it was started."""
        ...

    def judge(self, model_dir: Path) -> EngineHandle:
        """The engine of `[engines.judge]` with this model; one that has died is replaced. Raises as `engines`."""
        ...

    def placement(self) -> Placement:
        """The cards of ranks and engines. Raises InputError: not on this machine."""
        ...

    def processes(self) -> dict[str, int]:
        """Process ids of what was started: `trainer-RANK`, `engine-NUMBER`, `node`."""
        ...
