"""Processes that work in step, and calls to them with a deadline."""

from typing import Any, Protocol


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
