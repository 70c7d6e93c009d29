"""Processes that work in step, and calls to them with a deadline."""

from collections.abc import Callable
from typing import Any, Concatenate, Protocol, cast

from tasks.config.run import WorkersSection


class Pending[R](Protocol):
    """A call that was sent and whose results have not been requested yet."""

    def wait(self, deadline_s: float) -> R:
        """The results.

        Raises:
            WorkerLost: a member died, failed with an error that is not ours, or did not answer within the deadline;
                the group is ended.
            RatchetError: what all members raised.
        """
        ...


class Group(Protocol):
    """Processes that work in step: every call goes to all of them, and they are dead as soon as one of them is."""

    def submit(self, method: str, *arguments: Any, **options: Any) -> Pending[list[Any]]:
        """Call a method on every member with the same arguments, without waiting; one result per member.

        Raises:
            WorkerLost: the group has ended.
        """
        ...

    def alive(self) -> bool:
        """Whether no member is known to be dead. A group with a dead member is ended."""
        ...

    def processes(self) -> list[int]:
        """Process ids of the members."""
        ...

    def end(self) -> None:
        """End the members' processes."""
        ...


class GroupHandle:
    """A group behind typed calls. A call raises what the members raise, or WorkerLost."""

    def __init__(self, group: Group, deadlines: WorkersSection) -> None:
        self._group, self.deadlines = group, deadlines
        self.awaited = False
        """Whether it was waited for since it was started."""

    def submit[**P, R](
        self, method: Callable[Concatenate[Any, P], R], *arguments: P.args, **options: P.kwargs
    ) -> Pending[list[R]]:
        """Begin a call of a method of the members' protocol, such as one side of a transfer; one result per member."""
        return cast(Pending[list[R]], self._group.submit(method.__name__, *arguments, **options))

    def alive(self) -> bool:
        """Whether no member is known to be dead."""
        return self._group.alive()

    def end(self) -> None:
        """End the members' processes."""
        self._group.end()

    def processes(self) -> list[int]:
        """Process ids of the members, as `Group.processes`."""
        return self._group.processes()

    def _results[R](self, pending: Pending[list[R]]) -> list[R]:
        return pending.wait(self.deadlines.call_deadline_s)
