"""Marks of a configuration key: its meaning beside its type, in `Annotated`.

A key is declared once. The identity of a run, the settings of each stage, the reference, the form and the checks follow
from the marks (`tasks/config/keys.py`). The keys of a table have the stages of the table, unless they have their own.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Mark:
    """One mark; a key may have several."""

    stages: tuple[str, ...] | None = None
    """Stages whose result the key decides; for none of them it is a runtime setting, which may change at any time."""
    secret: bool = False  # given by reference (`env:NAME`) only
    place: Literal["files", "function"] | None = None
    """The key names files, whose content counts and not their place; or a function, of which the name counts."""

    def read_by(self, stage: str | None) -> bool:
        """True if the key decides the result of a stage; None is any stage."""
        return bool(self.stages) if stage is None else stage in (self.stages or ())


def decides(*stages: str) -> Mark:
    """Mark of a setting that decides the result of these stages."""
    return Mark(stages=stages)


RUNTIME = Mark(stages=())
FILES = Mark(stages=(), place="files")
FUNCTION = Mark(place="function")
SECRET = Mark(stages=(), secret=True)
