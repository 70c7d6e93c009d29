"""Waiting for a file of another process."""

import time
from pathlib import Path

from storage.errors import WorkerLost

_PATIENCE_S = 120.0
_PAUSE_S = 2e-4


def wait_for(path: Path) -> None:
    """Return once a file is there.

    Raises:
        WorkerLost: it does not appear.
    """
    end = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > end:
            raise WorkerLost(f"{path} did not appear within {_PATIENCE_S:g} s: the other side of the bench has failed")
        time.sleep(_PAUSE_S)
