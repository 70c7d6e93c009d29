"""Progress of long calls, sent through logging by the process that makes them.

Nothing is emitted until a handler is set: in the processes of a run, by `listen`."""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence

_EVERY_S = 1.0
_MOST = 2000
_LINE = re.compile(r"(\d+) of (\d+) ([a-z-]+)(?:, ([a-z]+ [-+.\dainfe]+))?")

logger = logging.getLogger("trainer_core.progress")


class _Whole:
    """True while a call reports its progress as a whole, so that its parts do not."""

    open = False


def told[T](items: Sequence[T], unit: str) -> Iterator[T]:
    """Yield the items, and report their number at most once a second; `unit` is their plural, such as micro-batches."""
    due = 0.0
    for number, item in enumerate(items):
        if not _Whole.open and time.monotonic() >= due:
            _tell(number, len(items), unit, "")
            due = time.monotonic() + _EVERY_S
        yield item


def told_whole[T](items: Sequence[T], unit: str, note: Callable[[], str]) -> Iterator[T]:
    """Like `told`, with a note such as `loss 0.5`; progress within an item is not reported."""
    due = 0.0
    try:
        _Whole.open = True
        for number, item in enumerate(items):
            if time.monotonic() >= due:
                _tell(number, len(items), unit, note())
                due = time.monotonic() + _EVERY_S
            yield item
    finally:
        _Whole.open = False


def reported(steps: int) -> list[int]:
    """Steps whose losses are reported, from 0: all, or of many some thousand and the last."""
    every = -(-steps // _MOST)
    return sorted({*range(every - 1, steps, every), steps - 1})


def _tell(number: int, of: int, unit: str, note: str) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info("%d of %d %s%s", number, of, unit, f", {note}" if note else "")


def understood(line: str) -> tuple[int, int, str, str] | None:
    """Parse a line: number done, total, unit, and the note, if any. None for any other line."""
    found = _LINE.fullmatch(line)
    return (int(found[1]), int(found[2]), found[3], found[4] or "") if found else None


def listen() -> None:
    """Write the lines to standard output."""
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO)
    logger.propagate = False
