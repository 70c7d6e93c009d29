"""Ending the process that drives a run, if it is one of this machine."""

import os
import signal
import time

from storage.backends.root import Root
from storage.errors import InputError
from storage.ownership.lease import holder
from storage.ownership.log import Entry
from storage.ownership.process import Life, life

STOP_SIGNAL = signal.SIGUSR1
"""Ends a holder that a flow run has started, without another try. SIGTERM may mean that the machine stops."""

ASKED_FOR = "flow run "  # prefix of the name of such a holder

_LOOK_SECONDS = 0.1


def end_holder(root: Root, run: str, seconds: float) -> tuple[Entry | None, bool]:
    """Ask the process that drives a run to end, as Ctrl-C would, and wait for that. Returns the newest entry of that
    process, None if the run is free, and whether it has ended within `seconds`. Raises InputError if the process is not
    known on this machine, or belongs to another user."""
    entry = holder(root, run)
    if entry is None:
        return None, True
    owner = entry.owner
    if life(owner) is not Life.ALIVE:
        fact = f"run {run!r} is driven by {owner}, which cannot be seen from here: run this command on that machine"
        raise InputError(f"{fact}, or `ratchet unlock {run} --force` if you know that the process is dead")
    # SIGINT is ignored by what a shell has started in the background
    number = STOP_SIGNAL if owner.name.startswith(ASKED_FOR) else signal.SIGTERM
    try:
        os.kill(owner.process, number)
    except PermissionError:
        raise InputError(f"run {run!r} is driven by {owner}, a process of another user: ask that user") from None
    except ProcessLookupError:
        return entry, True
    deadline = time.monotonic() + seconds
    while life(owner) is Life.ALIVE:
        if time.monotonic() >= deadline:
            return entry, False
        time.sleep(_LOOK_SECONDS)
    return entry, True
