"""Sample and score: input and result of a reward function. Imports nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which rewards are stored

Reason = Literal["exception", "exit", "no_number", "non_finite", "timeout"]


@dataclass(frozen=True)
class Sample:
    """Third argument of a reward function that takes one."""

    prompt_id: str
    sample_id: int
    """Number of the response within its prompt's group, from 0."""
    iteration: int
    """Iteration that sampled it."""
    finish_reason: str
    """stop, length or abort."""
    tokens: tuple[int, ...]
    """Token ids of the response, with the stop token."""


@dataclass(frozen=True)
class Score:
    """One sample's result. `reward` is None unless `status` is ok."""

    reward: float | None
    status: Literal["ok", "error", "timeout"]
    detail: str = ""
    """Reason of the failure, in words."""
    reason: Reason | None = None
    components: Mapping[str, float] | None = None
    """Named numbers that the reward is made of, if it has any."""


def failed(reason: Reason, detail: str) -> Score:
    return Score(None, "timeout" if reason == "timeout" else "error", detail, reason)
