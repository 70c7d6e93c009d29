"""Messages about a step over rows, from the scheduler to a model runner and back in arrays. Imports vLLM, but
no code for cards."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tasks.engine.vllm.rows import Planned


@dataclass
class Step(SchedulerOutput):
    """A step of which some requests are rows. These come first in `num_scheduled_tokens`."""

    planned: Planned | None = None
    """The rows."""
    alone: bool = False
    """It has no other requests, so it differs from the step before of the same number by new blocks at most."""


@dataclass
class Arrays(ModelRunnerOutput):
    """Samples of a step, without an object for each token."""

    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """By place in the batch."""
    counts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """1 where the step has sampled, 0 where a prompt is not complete."""
