"""A call that makes no progress says so itself, from a thread of its process: where it has been for most of a minute,
and for which stage. The line goes the way of all lines of a process, to the one that drives the run. A process that is
frozen says nothing; those that wait for it say that they wait."""

import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

STALL_S = 45.0
_LOOK_S = 5.0
_OURS = ("tasks", "trainer_core", "storage")
_PLACES = 3
_stage: ContextVar[str] = ContextVar("stage", default="")
_stages: list[str] = []  # of all threads


@contextmanager
def within(stage: str) -> Iterator[None]:
    """Say for which stage this thread works during a block, such as `train of iteration 3`."""
    before = _stage.set(stage)
    _stages.append(stage)
    try:
        yield
    finally:
        _stages.remove(stage)
        _stage.reset(before)


def current_stage() -> str:
    """The stage that this thread works for; empty outside of stages."""
    return _stage.get()


def stages() -> str:
    """Those that threads of this process work for."""
    return " and ".join(filter(None, _stages))


class Watch:
    """Looks at the call of one thread, and tells once where it stands still."""

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._call: tuple[int, str, int] | None = None  # its number, name and thread
        self._calls = 0
        self._seen: tuple[Any, ...] = ()
        self._since, self._told = 0.0, False

    @contextmanager
    def over(self, call: str) -> Iterator[None]:
        """Watch this thread for the duration of a call."""
        self._calls += 1
        named = f"{call} ({current_stage()})" if current_stage() else call
        self._call = self._calls, named, threading.get_ident()
        try:
            yield
        finally:
            self._call = None

    def begin(self) -> None:
        """Look every few seconds, in a thread of its own, as long as this process lives."""
        threading.Thread(target=self._keep, daemon=True, name="watch of stalls").start()

    def look(self) -> None:
        """Compare where the call is with where it was."""
        if (call := self._call) is None:
            return
        running = sys._current_frames().get(call[2])
        stack = tuple(frame for frame, _ in traceback.walk_stack(running)) if running else ()
        seen = (call[0], *((one.f_code, one.f_lasti) for one in stack))
        if seen != self._seen:
            self._seen, self._since, self._told = seen, self._clock(), False
        elif not self._told and self._clock() - self._since >= STALL_S:
            self._told = True
            self._say(f"no progress in {call[1]} for {STALL_S:.0f} s on host {socket.gethostname()}: {_places(stack)}")

    def _keep(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            self.look()


def _places(stack: tuple[FrameType, ...]) -> str:
    """The innermost place, and the innermost ones of the project that have led there."""
    ours = [one for one in stack[1:] if _module(one).partition(".")[0] in _OURS]
    some = (stack[0], *ours[:_PLACES])
    return ", called by ".join(f"{_module(one)}:{one.f_lineno} ({one.f_code.co_name})" for one in some)


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
