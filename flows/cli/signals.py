"""Handling of SIGINT, SIGTERM and SIGHUP: the first ends a command cleanly, another one at once."""

import contextlib
import os
import signal
import threading
import time
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Self

LIMIT_SECONDS = 90.0  # longest clean end. Most of it is waiting for a store that does not answer.

_SAME_SECONDS = 1.0  # a closing terminal and the shell in it, or a service manager, send several signals for one reason


class Signals:
    """Turns the first of the signals into KeyboardInterrupt, so that everything the command has begun is cleaned up.

    That takes at most `limit` seconds. After that, or on another signal, the process ends as if killed. What is
    committed stays committed either way, and the next start cleans up the rest.

    A signal that is ignored when the command starts (`nohup`, a background job) stays ignored."""

    def __init__(self, limit: float = LIMIT_SECONDS) -> None:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {number: signal.getsignal(number) for number in numbers}
        self._before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
        self._received: signal.Signals | None = None
        self._since = 0.0
        self._limit = limit
        # unlike an Event, it is safe in a handler, whatever the interrupted thread is doing
        self._news: SimpleQueue[str] = SimpleQueue()

    @property
    def received(self) -> bool:
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """Exit code of a process that the received signal has ended, as shells expect it."""
        return 128 + (self._received or signal.SIGINT)

    def __enter__(self) -> Self:
        for number in self._before:
            signal.signal(number, self._interrupt)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._news.put("over")

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        if self._received is not None:
            if time.monotonic() - self._since >= _SAME_SECONDS:
                self._end_at_once("another signal")
            return
        self._received, self._since = signal.Signals(number), time.monotonic()
        _say(
            f"{self._received.name}: ending within {self._limit:g} s. Another signal ends it at once. Nothing that "
            "was committed is lost"
        )
        self._news.put("interrupted")
        raise KeyboardInterrupt

    def _watch(self) -> None:
        if self._news.get() == "interrupted":
            try:
                self._news.get(timeout=self._limit)
            except Empty:
                self._end_at_once(f"ending took longer than {self._limit:g} s")

    def _end_at_once(self, why: str) -> None:
        _say(f"{why}: ended at once. Nothing that was committed is lost; the next start cleans up the rest")
        os._exit(self.exit_code)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        # bypasses the buffers and locks of the interrupted code
        os.write(2, f"ratchet: {text}\n".encode())
