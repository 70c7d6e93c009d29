"""Ending a block of the main thread with an error that another thread has found."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

_SIGNAL = signal.SIGURG  # ignored by the system where nothing handles it, so a late one does no harm


class Interruption(KeyboardInterrupt):
    """Raised in the block: code that lets Ctrl-C through and cleans up after it treats this alike."""


class Interruptible:
    """A block that `end_with` ends from another thread, as Ctrl-C would; it then raises the given error. The block must
    run in the main thread, which alone executes Python's signal handlers; elsewhere `end_with` has no effect."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._armed, self._interrupted = False, False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(_SIGNAL, self._interrupt)
            self._armed = True
        return self

    def end_with(self, error: Exception) -> None:
        """End the block; called in the main thread, it only notes the error."""
        self._error = error
        main = threading.main_thread()
        if self._armed and threading.current_thread() is not main and main.ident is not None:
            signal.pthread_kill(main.ident, _SIGNAL)  # also wakes it from a system call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._armed or self._interrupted:
            self._armed = False
            signal.signal(_SIGNAL, self._before or signal.SIG_DFL)
        # the interrupt may have become another error on the way, as it does at the start of a Prefect task run
        if self._interrupted and error is not None and self._error is not None:
            raise self._error from error

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._error is None and callable(self._before):
            self._before(number, frame)  # the handler of an enclosing block
        elif self._armed and self._error is not None:
            self._armed, self._interrupted = False, True
            raise Interruption(str(self._error))
