"""How long this process has waited for, or worked on, its storage: the price of durability."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_active = 0
_since = 0.0
_total = 0.0


@contextmanager
def measured() -> Iterator[None]:
    """Count the time of a block; also a decorator. Blocks may be nested and may overlap in several threads."""
    _change(+1)
    try:
        yield
    finally:
        _change(-1)


def seconds() -> float:
    """Wall time since the process began in which at least one such block was in progress."""
    with _lock:
        return _total + (time.perf_counter() - _since if _active else 0.0)


def _change(by: int) -> None:
    global _active, _since, _total
    with _lock:
        now = time.perf_counter()
        if _active:
            _total += now - _since
        _active, _since = _active + by, now
