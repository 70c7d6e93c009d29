"""Time that the current work has waited for storage, or worked on it: the cost of durability.

What happens behind it (uploads, renewals of the lease) is counted separately."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Meter:
    """Counts wall time during which at least one block is in progress, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active, self._since, self._total = 0, 0.0, 0.0

    def seconds(self) -> float:
        """Wall time so far, including blocks in progress."""
        with self._lock:
            return self._total + (time.perf_counter() - self._since if self._active else 0.0)

    def change(self, by: int) -> None:
        """A block begins (1) or ends (-1)."""
        with self._lock:
            now = time.perf_counter()
            if self._active:
                self._total += now - self._since
            self._active, self._since = self._active + by, now


_of_process = Meter()
_current: ContextVar[Meter] = ContextVar("meter", default=_of_process)


@contextmanager
def measured() -> Iterator[None]:
    """Count the time of a block; also a decorator. Blocks may be nested and may overlap in several threads."""
    meter = _current.get()
    meter.change(+1)
    try:
        yield
    finally:
        meter.change(-1)


def seconds() -> float:
    """Seconds that the meter of this context has counted; it is that of the process, unless `separate` gave another."""
    return _current.get().seconds()


@contextmanager
def separate() -> Iterator[Meter]:
    """Give a block its own meter, also for threads that it starts with its context (`parallel.each`)."""
    own = Meter()
    token = _current.set(own)
    try:
        yield own
    finally:
        _current.reset(token)
