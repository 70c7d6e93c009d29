"""How far a long call is, told by the process that does it. Whoever wants to know listens to the logger.

Nothing is emitted until a handler is set: in the processes of a run, by `listen`.
"""

import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence

_EVERY_S = 1.0
_LINE = re.compile(r"(\d+) of (\d+) ([a-z-]+)")

logger = logging.getLogger("trainer_core.telling")


def told[T](items: Sequence[T], unit: str) -> Iterator[T]:
    """The items, of which each is counted when it is asked for; tells at most once a second.

    Args:
        unit: what an item is, in the plural: micro-batches.
    """
    due = 0.0
    for number, item in enumerate(items):
        if logger.isEnabledFor(logging.INFO) and time.monotonic() >= due:
            logger.info("%d of %d %s", number, len(items), unit)
            due = time.monotonic() + _EVERY_S
        yield item


def understood(line: str) -> tuple[int, int, str] | None:
    """What a line of `told` says: how many are done, of how many, of what. None for any other line."""
    found = _LINE.fullmatch(line)
    return (int(found[1]), int(found[2]), found[3]) if found else None


def listen() -> None:
    """Write the lines to standard output."""
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO)
    logger.propagate = False
