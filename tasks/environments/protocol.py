"""The protocol of an environment. Imports nothing else.

Each conversation has an environment of its own: an instance of the class, made with the arguments of the configuration,
in a separate process. Beside the methods of the protocol it may have:

- a parameter `calls` of `step`: the calls of tools in the answer, read by the parser of the model's family, as tables
  with `name` and `arguments`, which are JSON.
- `tools`: definitions of functions, as OpenAI writes them, which the chat template shows to the model.
- `async replay(turns)`: bring an environment that was just reset to where it is after the `turns`, of class `Turn`.
- `async save()`, which returns a text after each turn, and `async load(record, seed, text)` in place of `reset`.

With `replay`, or `save` and `load`, a conversation goes on after its process was lost; else it starts again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Observation = str | Sequence[Mapping[str, Any]]  # a text, or chat messages with `role` and `content`


class Environment(Protocol):
    """One conversation at a time: `reset` begins it, each `step` takes an answer of the model."""

    async def reset(self, record: Mapping[str, Any], seed: int) -> Observation:
        """Begin a conversation about `record`, the prompt's whole record from the data set; `seed` decides everything
        random in it, and all samples of a prompt have the same. Returns the first observation, which the model
        answers."""
        ...

    async def step(self, action: str) -> tuple[Observation | None, float | None, bool]:
        """Take an answer of the model. Returns the next observation, which is None once the conversation is done; the
        reward of this answer, None if there is none or, at the end, if it could not be judged; and `done`."""
        ...


class ToolError(Exception):
    """Raised by a tool that was called wrongly: the policy is told, and goes on."""


@dataclass(frozen=True)
class Turn:
    """One answer of the model and its consequences."""

    observation: Observation  # the observation that the model answered
    action: str
    reward: float | None  # None if the answer could not be judged
    calls: Sequence[Mapping[str, str]] = ()  # as `step` was given them
