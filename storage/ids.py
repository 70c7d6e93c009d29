"""Names of things: runs and stages."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import StringConstraints

from storage.errors import InputError

_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

RunName = Annotated[str, StringConstraints(pattern=f"^{_RUN_NAME.pattern}$")]
"""Id of a run, which is also the name of its folder below the root."""

StageName = Annotated[str, StringConstraints(pattern=r"^[a-z-]+$")]
"""Name of a step whose result is one manifest. Storage takes any; `Workflow` gives them meaning."""


@dataclass(frozen=True)
class Workflow:
    """The stages of a workflow that mean something to storage."""

    prepares: str  # done once, in iteration 0: its tables are the prompts
    samples: str  # its tables are samples
    scores: str  # its tables are the scores of samples
    holds_state: str  # its parts are a train state, which retention may delete
    ends_iteration: str
    """Once it is committed, the next iteration can begin; the state of that iteration is the newest one served."""
    selects: str  # its tables are samples of other runs, copied; the part `storage.selection.SOURCES` says which
    behind: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stages of the same iteration that are made from a stage, directly or not. Others cannot be done again."""
    decides_state: Callable[[str], bool] = lambda _: True
    """Tells of a setting, `section.key`, whether it decides a train state that is made from given samples."""
    preparation: tuple[str, ...] = ()  # stages of iteration 0, in the order of work
    iteration: tuple[str, ...] = ()  # those of every other iteration
    optional: tuple[str, ...] = ()  # those of them that make scores, which some runs do without

    def stages_of(self, iteration: int) -> tuple[str, ...]:
        return self.iteration if iteration else self.preparation

    def leads_on(self, stage: str) -> bool:
        """True if the next iteration is made from a stage."""
        return self.ends_iteration in (stage, *self.behind[stage])


def is_run_name(name: str) -> bool:
    return _RUN_NAME.fullmatch(name) is not None


def check_run_name(name: str) -> str:
    """Return `name` if it can be the id of a run. Raises InputError, with the rule, if not."""
    if not is_run_name(name):
        fact = f"run name {name!r} cannot be used: give 1 to 63 characters of a-z, 0-9, '.', '_' and '-'"
        raise InputError(f"{fact}, starting with a letter or a digit")
    return name
