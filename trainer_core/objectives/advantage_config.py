"""Configuration of advantages and of rewards of long responses. Imports no torch.

The properties of each table state its needs, so that no other code compares its `type`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from trainer_core.frozen import Frozen
from trainer_core.objectives.user_config import UserTable


class AdvantageTable(Frozen):
    """Properties of an advantage."""

    runs_user_code: ClassVar[bool] = False
    per_token: ClassVar[bool] = False
    """One value for each response token, not for each sample."""
    needs_values: ClassVar[bool] = False
    """The values of a critic are compared with the rewards."""

    @property
    def compares(self) -> str | None:
        """Setting by which a sample that is alone in its group teaches nothing; None if it does."""
        return f'advantage.type = "{dict(self)["type"]}"'


class GroupAdvantage(AdvantageTable):
    """Rewards relative to the prompt's group: GRPO, or Dr. GRPO with `normalize_by_std = false`."""

    type: Literal["grpo"] = "grpo"
    """GRPO: reward minus the group's mean, divided by the group's standard deviation if `normalize_by_std`."""


class LeaveOneOutAdvantage(AdvantageTable):
    """Rewards relative to the other samples of the prompt (RLOO)."""

    type: Literal["rloo"] = "rloo"
    """RLOO: reward minus the mean of the group's other samples."""


class BatchAdvantage(AdvantageTable):
    """Rewards normalised over all samples of an iteration (REINFORCE++)."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    """REINFORCE++: reward, centred and divided by the standard deviation over all trained tokens."""
    baseline: bool = False
    """Subtract the group's mean first (REINFORCE++-baseline)."""
    per_token = True

    @property
    def compares(self) -> str | None:
        """The group's mean compares."""
        return "advantage.baseline = true" if self.baseline else None


class GeneralizedAdvantage(AdvantageTable):
    """Generalised advantage estimation over the values of a critic (PPO)."""

    type: Literal["gae"] = "gae"
    """GAE: what follows a token, in rewards and in values of `train.critic`, minus its own value."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of what follows, per token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Weight of later tokens: 0 trusts the next value alone, 1 the rewards alone."""
    normalize: bool = True
    """Centre the advantages and divide them by their standard deviation over all trained tokens."""
    per_token = True
    needs_values = True

    @property
    def compares(self) -> str | None:
        """None: the critic compares."""
        return None


class UserAdvantage(UserTable):
    """Advantages by a function or class of your own."""

    type: Literal["custom"] = "custom"
    """A function or class of your own, which is given the scored samples: see docs/extending.md."""
    per_token: bool = False
    """It returns a value for each response token, not for each sample."""
    needs_values: ClassVar[bool] = False
    compares: ClassVar[str | None] = None


Advantage = Annotated[
    GroupAdvantage | LeaveOneOutAdvantage | BatchAdvantage | GeneralizedAdvantage | UserAdvantage,
    Field(discriminator="type"),
]


class NoOverlong(Frozen):
    """Long responses are rewarded like others."""

    type: Literal["none"] = "none"
    """Rewards are as they were scored."""

    @property
    def first(self) -> int | None:
        """None: no length changes anything."""
        return None


class OverlongPenalty(Frozen):
    """A penalty that grows with the last tokens before the limit (DAPO)."""

    type: Literal["penalty"] = "penalty"
    """Subtract from the reward a penalty that grows linearly over the last `buffer` tokens before `length`."""
    length: int = Field(ge=1)
    """Response tokens from which the penalty is whole; usually `rollout.max_tokens`."""
    buffer: int = Field(ge=1)
    """Response tokens before `length` over which it grows from 0."""
    factor: float = Field(default=1.0, gt=0)
    """The whole penalty."""

    @property
    def first(self) -> int | None:
        """Smallest length in tokens that has a penalty."""
        return self.length - self.buffer + 1

    @model_validator(mode="after")
    def _fits(self) -> "OverlongPenalty":
        if self.buffer > self.length:
            raise ValueError(f"buffer {self.buffer} is above length {self.length}: make it smaller")
        return self


class OverlongLeftOut(Frozen):
    """Responses that reached the limit do not count (DAPO's overlong filtering)."""

    type: Literal["leave_out"] = "leave_out"
    """Neither train on responses of `length` tokens or more nor compare others with them."""
    length: int = Field(ge=1)
    """Response tokens; usually `rollout.max_tokens`, at which responses are cut off."""

    @property
    def first(self) -> int | None:
        """Smallest length in tokens that is left out."""
        return self.length


Overlong = Annotated[NoOverlong | OverlongPenalty | OverlongLeftOut, Field(discriminator="type")]
