"""A tracker: one JSON line for each iteration, in a file below the home folder that other programs follow.

In the configuration: [report]
                      trackers = ["tracker.py:JsonLines"]
"""

import json
from pathlib import Path

from ratchet import Row, TrackedRun

FOLDER = Path.home() / "ratchet-metrics"


class JsonLines:
    """A file for each run."""

    def begin(self, run: TrackedRun) -> int:
        """Find the file of the run; the number of its lines is the first iteration that it lacks."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.file = FOLDER / f"{run.identity}.jsonl"
        return len(self._lines())

    def log(self, row: Row) -> None:
        """Append a line. A row that is there already, or that a kill tore, is written once."""
        lines = self._lines()[: row.iteration]
        line = json.dumps({"iteration": row.iteration, **row.values})
        self.file.write_text("".join(f"{one}\n" for one in [*lines, line]), encoding="utf-8")

    def end(self, complete: bool) -> None:
        """Mark the file of a complete run."""
        if complete:
            self.file.with_suffix(".complete").touch()

    def _lines(self) -> list[str]:
        """The lines that are whole."""
        text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()
