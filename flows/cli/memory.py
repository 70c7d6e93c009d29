"""Peak memory of this process and everything it started."""

import threading
from typing import Self

import psutil

_PERIOD_S = 2.0
_GIB = 1 << 30


class MemoryMeter:
    """Samples the proportional set size (PSS) of the process tree: shared pages count once, however many map them."""

    def __init__(self, period_s: float = _PERIOD_S) -> None:
        self._period_s = period_s
        self._peak_bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-meter", daemon=True)

    @property
    def peak_gib(self) -> float:
        """Largest total seen so far, GiB."""
        return self._peak_bytes / _GIB

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self._peak_bytes = max(self._peak_bytes, tree_bytes())
            if self._end.wait(self._period_s):
                return


def tree_bytes() -> int:
    """PSS of this process and all its descendants now, bytes."""
    own = psutil.Process()
    return sum(_pss(process) for process in [own, *own.children(recursive=True)])


def _pss(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:  # it ended meanwhile, or belongs to another user
        return 0
