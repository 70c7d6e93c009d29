"""Pause garbage collection during bulk allocation."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause Python's garbage collector in the block. Collections take a fifth of the time of importing vLLM, for a
    million objects that stay. A weight update makes enough objects to start one, which looks at all objects of the
    process for half a second."""
    if not gc.isenabled():  # by a block around this one
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
