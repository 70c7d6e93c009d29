"""The tables `[reward]`, how responses are scored, and `[environment]`, conversations in place of plain answers."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat, JsonValue, create_model, model_validator

from tasks.config.credentials import literal_secrets
from tasks.config.section import Section
from trainer_core.marks import FUNCTION, RUNTIME


def _by_reference(place: str, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The arguments. Raises ValueError: one looks like a secret, and is not given by reference."""
    if found := list(literal_secrets(arguments, place)):
        fact = f"{' and '.join(found)} would be stored with the run, and looks like a secret"
        raise ValueError(f'{fact}: give it by reference, as "env:NAME", and export NAME')
    return arguments


Arguments = dict[str, JsonValue]
Weights = dict[str, FiniteFloat]
_DEFAULT = "exact_match"

_TRY = (
    "Call the reward before the run, in `ratchet check` and at each start, on a few records with their own answer and "
    "with a wrong one. Set it to false for a reward that costs or acts."
)
# a keyword of Python cannot be written as a field
_FIELDS: Any = {"try": (Annotated[bool, RUNTIME], Field(default=True, description=_TRY))}
_Tried = create_model("_Tried", __base__=Section, **_FIELDS)


class RewardFunction(Section):
    """One function of several, whose weighted sum is the reward."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,40}$")]
    """Name of the component: `reward/NAME` among the metrics."""
    function: Annotated[str, FUNCTION]
    """As `reward.function`."""
    weight: FiniteFloat = 1.0
    """Factor in the reward; 0 records the component without rewarding it."""
    arguments: Annotated[Arguments, AfterValidator(partial(_by_reference, "arguments"))] = Field(default={})
    """As `reward.arguments`."""
    weights: Weights = Field(default={})
    """As `reward.weights`."""
    batch: bool = False
    """As `reward.batch`."""

    @property
    def key(self) -> str:
        """The setting that names it, for messages."""
        return f"reward.functions ({self.name}): function" if self.name else "reward.function"


class RewardSection(_Tried):
    """Scoring by a function `(record, response)` or `(record, response, sample)`: a number, or several by name."""

    function: Annotated[str, FUNCTION] = _DEFAULT
    """Name of an entry point in the group `ratchet.rewards`, `package.module:function`, or `file.py:function` with a
    file beside the configuration or in the working directory. Of a file only the name is meaning, not the folder and
    not the content: a changed file applies to the iterations that are not scored yet."""
    arguments: Annotated[Arguments, AfterValidator(partial(_by_reference, "reward.arguments"))] = Field(default={})
    """Keyword arguments bound to the function. A secret is given as "env:NAME", a reference to the environment."""
    weights: Weights = Field(default={})
    """For a function that returns named components: their factors in the reward; 1 for those that are not named."""
    batch: bool = False
    """Call the function once for all samples of an iteration, in one process: with lists, `(records, responses)`. It
    returns a result for each."""
    functions: tuple[RewardFunction, ...] = ()
    """Several functions instead of one, as tables `[[reward.functions]]` with `name` and `function`, and optionally
    `weight`, `arguments`, `weights` and `batch`. The reward is the weighted sum."""
    max_failures: Annotated[float, RUNTIME] = Field(default=0.1, ge=0, le=1)
    """Share of an iteration's responses that may remain without a score (error, time-out, number that is not finite).
    Above it the stage fails before anything is trained."""
    deadline_s: Annotated[float, RUNTIME] = Field(default=5.0, gt=0)
    """Seconds after which a sample is recorded as timed out; enforced only in separate scoring processes. A batch has
    as many for each of its samples."""
    start_deadline_s: Annotated[float, RUNTIME] = Field(default=60.0, gt=0)
    """Seconds for importing the function in a scoring process, and beyond `deadline_s` for its calls until the first
    that gives a score: what a function imports or loads when it is called is not charged to a sample. A later call that
    is late is repeated once in a new process, with that time."""
    processes: Annotated[int, RUNTIME] = Field(default=0, ge=0)
    """Scoring processes; 0 scores in the calling one: built-in functions that cannot hang do, others get a process."""

    @model_validator(mode="after")
    def _one_form(self) -> "RewardSection":
        if not self.functions:
            return self
        if self.function != _DEFAULT or self.arguments or self.weights or self.batch:
            fact = "reward.functions excludes reward.function, arguments, weights and batch"
            raise ValueError(f"{fact}: give these for each function")
        names = [one.name for one in self.functions]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"reward.functions has two functions with the name {twice!r}: give each its own")
        return self

    @property
    def tried(self) -> bool:
        return vars(self)["try"]

    @property
    def parts(self) -> tuple[RewardFunction, ...]:
        """The functions, also if it is one, whose name is then empty."""
        given = {key: dict(self)[key] for key in ("function", "arguments", "weights", "batch")}
        return self.functions or (RewardFunction.model_construct(name="", weight=1.0, **given),)


class EnvironmentSection(Section):
    """Conversations: the policy answers, an environment answers the policy, and in the end there is a reward."""

    function: Annotated[str, FUNCTION]
    """Class of the environment, list of functions that are tools, or async function `drive(base_url, api_key, record,
    seed)` that drives conversations through a client of the run's endpoint: `file.py:NAME` with a file beside the
    configuration or in the working directory, `package.module:NAME`, or an entry point of the group
    `ratchet.environments`."""
    arguments: Annotated[Arguments, AfterValidator(partial(_by_reference, "environment.arguments"))] = Field(default={})
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
