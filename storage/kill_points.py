"""Named points in a stage's work: the moments at which a crash leaves storage in different states.

`ratchet prove-resume` and the fault matrix kill processes there. Otherwise there are no observers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum


class Point(StrEnum):
    """A moment of a stage, in the order of work."""

    STARTED = "started"  # before the first byte
    MID_PART = "mid-part"  # some bytes of a part are written, but its name does not exist yet
    MID_RESPONSE = "mid-response"  # an increment of responses is recorded that go on
    UPLOAD = "upload"  # some files of a train state or a model are stored, but not all
    SENT = "sent"  # the engines hold new weights, verified, and none serves them yet
    SERVED = "served"  # one more engine serves them
    PARTS_DONE = "parts-done"  # every part is stored, but not the manifest
    COMMITTED = "committed"  # the manifest is published, but the stage has not returned


Observer = Callable[[Point, str], None]
"""Gets the point, and a key or path below the root that names iteration and stage."""

_observers: list[Observer] = []


def reached(point: Point, key: str) -> None:
    """Notify the observers, of which there are none in ordinary work."""
    for observer in _observers:
        observer(point, key)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Notify `observer` of every point that this process reaches inside the block, in any thread."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
