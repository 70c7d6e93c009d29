"""Section `rollout`: samples of one iteration."""

import operator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from tasks.config.section import COLDEST, Section
from trainer_core.marks import RUNTIME, decides

STOP_BYTES = 256  # of all stop texts: each is a state of an automaton, with an entry for each token


class IncrementsSection(Section):
    """Responses in progress that are stored before they end, so that a run that is killed goes on with them."""

    tokens: int = Field(default=256, ge=1)
    """A response is stored again when it has grown by so many tokens."""
    seconds: float = Field(default=10.0, gt=0)
    """And after this time, if it has grown."""


class RolloutSection(Section):
    """Samples of one iteration."""

    prompts: int = Field(default=32, ge=1)
    """Prompt groups per iteration."""
    most_prompts: int | None = Field(default=None, ge=1)
    """Dynamic sampling (DAPO): further prompts are drawn until `prompts` groups have a spread of rewards, at most so
    many in all. By default no further ones."""
    samples: int = Field(default=8, ge=1)
    """Samples of each prompt: the group of GRPO."""
    temperature: Annotated[float, decides("rollout", "train")] = Field(default=1.0, ge=COLDEST)
    """Sampling temperature; the trainer divides its logits by it too. vLLM would raise what is lower."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass."""
    top_k: int = Field(default=0, ge=0)
    """Likeliest tokens that can be drawn; 0 for all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Least probability of a token that can be drawn, as a share of the likeliest one's."""
    max_tokens: Annotated[int, decides("rollout", "evaluate")] = Field(default=16, ge=1)
    """Limit on response tokens."""
    stop_tokens: Annotated[tuple[int | str, ...] | None, decides("prepare", "rollout", "evaluate")] = None
    """Tokens that end a response, as texts or ids; by default all that config.json, generation_config.json and the
    tokenizer name."""
    stop: Annotated[tuple[str, ...], decides("rollout", "evaluate")] = ()
    """Texts that end a response, wherever they lie in its tokens: `["</answer>"]`. The token that completes one is the
    last of the response, with all of its text."""
    special_tokens: Annotated[Literal["shown", "hidden"], decides("prepare", "rollout", "evaluate")] = "shown"
    """Special tokens in the texts of responses that rewards and people see, beside stop, padding and BOS tokens, which
    these never have."""
    groups_per_part: Annotated[int, RUNTIME] = Field(default=64, ge=1)
    """Prompt groups in one stored part."""
    increments: Annotated[IncrementsSection, RUNTIME] = IncrementsSection()
    ahead: int = Field(default=0, ge=0)
    """Iterations whose rollouts may be sampled beside the training of one: each rollout is sampled with weights that
    are so many updates older. With 0 rollout and training take turns."""
    updates: Literal["between", "in-flight"] = Field(default="between", exclude_if=lambda value: value == "between")
    """Moment at which responses get new weights: `between` samples, or `in-flight`, where a rollout goes on with the
    responses that the one before it has left open. Needs `ahead`."""
    pause_tokens: int = Field(default=256, ge=1, exclude_if=lambda value: value == 256)
    """With `in-flight` updates open responses grow by so many tokens, then pause: enough groups end the rollout."""
    open_prompts: int | None = Field(default=None, ge=2, exclude_if=operator.not_)
    """Prompt groups in flight with `in-flight` updates, those of the iteration included. By default twice `prompts`."""
    max_staleness: int | None = Field(default=None, ge=0, exclude_if=lambda value: value is None)
    """Bound of staleness with `in-flight` updates: a group with a token whose weights are older by more updates is left
    out, and its prompt drawn again. By default there is no bound."""

    @property
    def in_flight(self) -> int:
        """Prompt groups in flight with `in-flight` updates."""
        return self.open_prompts or 2 * self.prompts

    @field_validator("stop")
    @classmethod
    def _can_end(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        if "" in texts:
            raise ValueError("an empty text would end every response at once: leave it out")
        if (size := sum(len(text.encode()) for text in texts)) > STOP_BYTES:
            raise ValueError(f"the texts have {size} bytes, and at most {STOP_BYTES} are looked for: shorten them")
        return texts
