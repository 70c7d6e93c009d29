"""Processes that work in step, and calls to them with a deadline."""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, Concatenate, Protocol, Self, cast

import psutil

from tasks.config.run import WorkersSection


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
