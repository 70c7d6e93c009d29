"""Actions of the processes of a small run: one line each, appended at once, so that a kill loses no entry."""

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

_PATIENCE = 60.0


@dataclass(frozen=True)
class Entry:
    """One action."""

    what: str
    """process (started), called (a method of workers), sampled (a sample, requested of the engine), body (of a stage,
    begun), piece (generated and recorded), settle (something waits for what is to be stored) or concluded (all of an
    iteration is published)."""
    name: str
    """Name of the process, method, stage, piece or other subject."""
    number: int
    """Process id, iteration, or seed of a sample."""


class Journal:
    """Written by the process that drives a run."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        self._entries: list[Entry] = []
        self._changed = threading.Condition()

    def note(self, what: str, name: str, number: int) -> None:
        entry = Entry(what, name, number)
        os.write(self._file, json.dumps(asdict(entry)).encode() + b"\n")
        with self._changed:
            self._entries.append(entry)
            self._changed.notify_all()

    def wait_for(self, what: str, count: int) -> None:
        """Wait until another thread has noted this many of these."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.count(what) >= count, _PATIENCE):
                raise TimeoutError(f"{what} number {count} was not noted in time")

    def count(self, what: str) -> int:
        """Count the entries of one kind."""
        return sum(entry.what == what for entry in self._entries)


def read_journal(path: Path) -> list[Entry]:
    """Read all entries, in order."""
    return [Entry(**json.loads(line)) for line in path.read_text().splitlines()]
