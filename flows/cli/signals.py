"""What SIGINT, SIGTERM and SIGHUP do to a command: it ends as if by Ctrl-C, once, and clears up in peace."""

import signal
from types import FrameType
from typing import Self


class Signals:
    """Turns the first of the signals into KeyboardInterrupt; later ones must not disturb the clearing up.

    A signal that is ignored when the command starts (`nohup`, a background job) stays ignored.
    """

    def __init__(self) -> None:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {number: signal.getsignal(number) for number in numbers}
        self._before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
        self._received: signal.Signals | None = None

    @property
    def received(self) -> bool:
        """Whether one of the signals came."""
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that the received signal has ended."""
        return 128 + (self._received or signal.SIGINT)

    def take(self) -> None:
        """Become the handler, also when somebody else has become it meanwhile."""
        for number in self._before:
            signal.signal(number, self._interrupt)

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        for other in self._before:
            signal.signal(other, signal.SIG_IGN)
        self._received = signal.Signals(number)
        raise KeyboardInterrupt
