"""Python's garbage collector: nothing waits for it while there is nothing to find."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collections in the block.

    They take a fifth of the time of importing vLLM, for a million objects that stay; and a weight update makes as many
    objects as set one off, which looks at all of the process's for half a second.
    """
    if not gc.isenabled():  # by a block around this one
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
