"""Orders for the processes of a run of the bench of failures, and marks that they note."""

import time
from pathlib import Path

from pydantic import BaseModel

from infra.bench.cases import KillName

PLAN, MARKS = "plan.json", "marks.jsonl"
"""Files in the folder of a run."""


class Plan(BaseModel):
    """Victim, and moments of its death."""

    kill: KillName
    """The last trainer rank, or the engine."""
    at: tuple[int, ...] = ()
    """Of a rank the updates at which it dies, of an engine the iterations."""
    pause_s: float = 0.0
    """Seconds that an engine waits before each step of a rollout."""

    @classmethod
    def of(cls, folder: Path) -> "Plan":
        """The plan of a run."""
        return cls.model_validate_json((folder / PLAN).read_text())


class Mark(BaseModel):
    """Something that happened."""

    what: str
    """`killed`, `begun`, or the name of a step."""
    at: float
    """Seconds since the epoch."""
    stored: int = 0
    """Of `begun`: tokens of these responses that are stored."""
    again: int = 0
    """Of `begun`: tokens among them that the engine is not told, and so samples again."""


def note(folder: Path, what: str, stored: int = 0, again: int = 0) -> None:
    """Note that it happens now; with one write, because the process may die at once."""
    mark = Mark(what=what, at=time.time(), stored=stored, again=again)
    with (folder / MARKS).open("a", encoding="utf-8") as file:
        file.write(mark.model_dump_json() + "\n")


def noted(folder: Path) -> list[Mark]:
    """Marks of a run, in order."""
    path = folder / MARKS
    return [Mark.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []
