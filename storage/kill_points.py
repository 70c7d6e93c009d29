"""Named points of a stage's work: the moments at which a crash leaves storage in different states.

`ratchet prove-resume` and the fault matrix kill processes there. Nobody observes them otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum


class Point(StrEnum):
    """A moment of a stage, in the order of work."""

    STARTED = "started"
    """Before the first byte."""
    MID_PART = "mid-part"
    """Some bytes of a part are written, its name is not there."""
    UPLOAD = "upload"
    """Of several files, a train state's or a model's, some are stored, not all."""
    PARTS_DONE = "parts-done"
    """Every part is stored, the manifest is not."""
    COMMITTED = "committed"
    """The manifest is published, and nobody has heard of it."""


Observer = Callable[[Point, str], None]
"""Is told the point, and a key or path below the root that names iteration and stage."""

_observers: list[Observer] = []


def reached(point: Point, key: str) -> None:
    """Tell the observers, of whom there are none in ordinary work."""
    for observer in _observers:
        observer(point, key)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Let `observer` know of every point that this process reaches inside the block, in whichever thread."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
