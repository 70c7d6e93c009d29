"""The use of Ray by the threads of this process, such as that of a training and that of the rollout beside it.

Ray ends the process at once if one thread leaves it while another is inside a call of it, or lets go of a result. So
whoever leaves waits for the others, which wait for results a second at a time, and what they hold is kept."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import ray

from storage.errors import WorkerLost

_LOOK_S = 1.0  # between two looks of a thread that waits
_LEAVE_S = 30.0  # longest wait for calls that do not return, as those to a frozen process of Ray


class Connection:
    """The Rays that this process uses, one after the other, by number."""

    def __init__(self) -> None:
        self.number = 0
        self.check: Callable[[], None] = _unchecked
        """Raises WorkerLost: a process without which this Ray does not work has ended."""
        self._turn = threading.Condition()
        self._inside = 0
        self._holders: WeakSet[Any] = WeakSet()
        self._kept: list[Any] = []

    def held_by(self, holder: Any) -> int:
        """Note an object that holds actors or results of this Ray; returns Ray's number."""
        self._holders.add(holder)
        return self.number

    def call[**P, R](self, number: int, work: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        """Do what calls the Ray of that number, for about a second at most. Raises WorkerLost: it has ended."""
        with self._turn:
            if number != self.number:
                raise WorkerLost("the Ray that it was asked of has ended; the next attempt starts over")
            self.check()
            self._inside += 1
        try:
            return work(*arguments, **options)
        finally:
            with self._turn:
                self._inside -= 1
                self._turn.notify_all()

    def wait(self, number: int, pending: Sequence[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
        """Calls that have ended, as soon as one has, if one does in time; and the others. Raises as `call`."""
        end = time.monotonic() + timeout_s
        while True:
            left = max(0.0, end - time.monotonic())
            ready, others = self.call(number, _ended, pending, min(_LOOK_S, left))
            if ready or left <= _LOOK_S:
                return ready, others

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Leave this Ray in the block, in which no thread calls it; nor does one call it by its number afterwards."""
        with self._turn:
            self.number += 1
            self._turn.wait_for(lambda: not self._inside, _LEAVE_S)
            self._kept += self._holders
            self._holders, self.check = WeakSet(), _unchecked
            yield


def _unchecked() -> None:
    pass


def _ended(pending: Sequence[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
    """As `ray.wait`, all that have ended. A signal's handler may end the wait. Of what a handler raises, Ray lets
    KeyboardInterrupt alone through; anything else, as Prefect's for SIGTERM, becomes the cause of a SystemError, which
    nobody would take for the end that was asked for."""
    try:
        first, others = ray.wait(list(pending), num_returns=1, timeout=timeout_s)
        # all that are there: of thousands one at a time would cost seconds
        more, others = ray.wait(others, num_returns=len(others), timeout=0) if first and others else ([], others)
    except SystemError as error:
        raise (error.__cause__ or error) from None
    return [*first, *more], others


CONNECTION = Connection()
"""Connection of this process, which has one Ray at a time."""
