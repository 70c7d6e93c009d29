"""The protocol of an environment. Imports nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Observation = str | Sequence[Mapping[str, Any]]  # a text, or chat messages with `role` and `content`


class Environment(Protocol):
    """One conversation at a time: `reset` begins it, each `step` takes an answer of the model."""

    async def reset(self, record: Mapping[str, Any], seed: int) -> Observation:
        """Begin a conversation about `record`, the prompt's whole record from the data set; `seed` decides everything
        random in it. Returns the first observation, which the model answers."""
        ...

    async def step(self, action: str) -> tuple[Observation | None, float | None, bool]:
        """Take an answer of the model. Returns the next observation, which is None once the conversation is done; the
        reward of this answer, None if it could not be judged; and `done`."""
        ...
