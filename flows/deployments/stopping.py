"""A flow run that `ratchet stop` ends: it becomes Cancelled, so that nobody tries it again without being asked."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from storage.ownership.stopping import STOP_SIGNAL


class Stopped(KeyboardInterrupt):
    """Raised in the block: code that lets Ctrl-C through and cleans up after it treats this alike."""


@contextmanager
def stoppable() -> Iterator[None]:
    """A block of the main thread that ends with `Stopped` when `ratchet stop` asks for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(STOP_SIGNAL, _stop)
    try:
        yield
    finally:
        signal.signal(STOP_SIGNAL, before or signal.SIG_DFL)


def _stop(_number: int, _frame: FrameType | None) -> None:
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # a second one does not disturb the cleaning up
    raise Stopped("`ratchet stop`")
