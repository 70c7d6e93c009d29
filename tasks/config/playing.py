"""The table `[environment]`: conversations of several turns in place of plain answers."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from tasks.config.reward import Arguments, by_reference
from tasks.config.section import Section
from trainer_core.marks import FUNCTION, RUNTIME


class EnvironmentSection(Section):
    """Conversations: the policy answers, an environment answers the policy, and in the end there is a reward."""

    function: Annotated[str, FUNCTION]
    """Class of the environment, list of functions that are tools, or async function `drive(base_url, api_key, record,
    seed)` that drives conversations through a client of the run's endpoint: `file.py:NAME` with a file beside the
    configuration or in the working directory, `package.module:NAME`, or an entry point of the group
    `ratchet.environments`."""
    arguments: Arguments = Field(default={})
    """Keyword arguments of the class. A secret is given as "env:NAME", a reference to the environment."""
    model: str = "policy"
    """Name of the model that clients of a function `drive` give; another one is refused."""
    sampling: Literal["override", "refuse"] = "override"
    """Treatment of sampling parameters of clients that the trainer cannot follow, as a temperature of their own: they
    have no effect and are recorded, or such a request is refused."""
    tool_parser: str = "tags"
    """Reader of the calls of tools in answers, for clients and for a `step` with calls: `tags` reads JSON within
    `<tool_call>`, and reasoning before `</think>`; any other name is a tool parser of vLLM, in a process of its own."""
    reasoning_parser: str = ""
    """Reasoning parser of vLLM, beside a tool parser of vLLM; by default none."""
    turns: int = Field(default=8, ge=1)
    """Answers after which a conversation ends; it keeps the rewards that it has. `rollout.max_tokens` limits each."""
    tokens: int | None = Field(default=None, ge=1)
    """Limit on the tokens after the prompt, sampled and observed; by default what `engine.max_model_len` leaves."""
    seconds: Annotated[float, RUNTIME] = Field(default=120.0, gt=0, le=1e8)
    """Seconds that the environment of one conversation may take in all of its calls. One that takes longer is ended,
    and named: a failure, and no reward."""
    retries: Annotated[int, RUNTIME] = Field(default=2, ge=0)
    """Fresh environments that a conversation gets after failures: an error, a process that ended, a call whose result
    is not known. After the last one it has no reward, and nothing is trained on it."""
    processes: Annotated[int, RUNTIME] = Field(default=64, ge=1)
    """Conversations at a time, each with a process of its own for its environment."""
    memory_mib: Annotated[int | None, RUNTIME] = Field(default=None, ge=16)
    """MiB that each process of an environment may allocate beyond what its import has. An allocation that fails is a
    failure, and no reward. By default nothing limits it."""

    @field_validator("arguments")
    @classmethod
    def _no_secrets(cls, arguments: Arguments) -> Arguments:
        return by_reference(arguments, "environment.arguments")
