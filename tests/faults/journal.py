"""What the processes of a small run did: a line each, appended at once, so that a kill loses nothing that was said."""

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

_PATIENCE = 60.0


@dataclass(frozen=True)
class Entry:
    """Something that was done."""

    what: str
    """process (started), body (of a stage, begun) or piece (generated and recorded)."""
    name: str
    """Of the process, the stage, the piece."""
    number: int
    """Process id, or iteration."""


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

    def wait_for(self, what: str, number: int, count: int) -> None:
        """Wait until another thread has noted so many of these."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._count(what, number) >= count, _PATIENCE):
                raise TimeoutError(f"waited in vain for {count} x {what} {number}")

    def _count(self, what: str, number: int) -> int:
        return sum((entry.what, entry.number) == (what, number) for entry in self._entries)


def read_journal(path: Path) -> list[Entry]:
    """Everything that was noted, in order."""
    return [Entry(**json.loads(line)) for line in path.read_text().splitlines()]
