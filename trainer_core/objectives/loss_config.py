"""Configuration of losses and importance corrections. Imports no torch.

The properties of each table state its needs, so that no other code compares its `type`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from trainer_core.frozen import Frozen
from trainer_core.objectives.user_config import UserTable

Level = Literal["token", "sequence", "sequence_mean"]
Need = Literal["advantages", "entropy", "reference", "behaviour"]
"""Inputs of a loss beside the log-probabilities of the policy."""


class LossTable(Frozen):
    """Properties of a loss."""

    runs_user_code: ClassVar[bool] = False
    needs: ClassVar[tuple[Need, ...]] = ("advantages",)
    paired: ClassVar[bool] = False
    """Mini-batches hold pairs of samples."""
    imitates: ClassVar[bool] = False
    """The samples become more likely, whatever policy drew them at whatever temperature."""
    trains_critic: ClassVar[bool] = False
    """The critic alone learns, whatever policy drew the samples; the policy stays as it is."""


class ClipLoss(LossTable):
    """PPO's clipped surrogate, with `clip_low` and `clip_high` of `[train.policy]`."""

    type: Literal["clip"] = "clip"
    """PPO's clipped surrogate; with `clip_high` above `clip_low` DAPO's."""
    dual_limit: float | None = Field(default=None, gt=1)
    """Dual clip: for a negative advantage A the loss is at most -A times this, such as 3; no limit if not given."""


class SequenceClipLoss(LossTable):
    """The clipped surrogate of whole sequences (GSPO)."""

    type: Literal["gspo"] = "gspo"
    """GSPO: one ratio for each sequence, the geometric mean over its tokens."""
    clip_low: float = Field(default=3e-4, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The ratio is clipped above at 1 + clip_high."""


class ClippedWeightLoss(LossTable):
    """REINFORCE with clipped importance weights (CISPO)."""

    type: Literal["cispo"] = "cispo"
    """CISPO: the ratio is a weight without gradient, clipped, so that no token loses its gradient."""
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is at least 1 - clip_low."""
    clip_high: float = Field(default=5.0, ge=0)
    """The weight is at most 1 + clip_high."""


class LikelihoodLoss(LossTable):
    """Maximum likelihood of the good samples (rejection sampling, filtered SFT)."""

    type: Literal["sft"] = "sft"
    """Negative log-likelihood of the samples that are kept."""
    above: float = 0.0
    """Keep the samples whose reward is above this."""
    best: bool = False
    """Of each prompt's kept samples keep only the one with the highest reward, the first if several have it."""
    needs = ()
    imitates = True


class PreferenceLoss(LossTable):
    """Direct preference optimisation on pairs of samples of one prompt (DPO)."""

    type: Literal["dpo"] = "dpo"
    """DPO: the sample with the higher reward is preferred."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull towards the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a preference is the wrong way round (conservative DPO)."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Of each prompt the best sample against the worst, or every pair with different rewards."""
    needs = ("reference",)
    paired = True


class RewardModelLoss(LossTable):
    """A reward model: the critic's value at the end of a response learns to order the samples of a prompt."""

    type: Literal["reward_model"] = "reward_model"
    """Bradley-Terry: the critic's value at the end of the response with the higher reward is to be the higher one. The
    policy stays as it is."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a preference is the wrong way round."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Of each prompt the best sample against the worst, or every pair with different rewards."""
    beta: ClassVar[float] = 1.0
    needs = ()
    paired = True
    trains_critic = True


class UserLoss(UserTable):
    """A loss by a function or class of your own."""

    type: Literal["custom"] = "custom"
    """A function or class of your own, which is given the response tokens: see docs/extending.md."""
    needs: tuple[Need, ...] = ("advantages",)
    """Inputs that it reads beside the log-probabilities: "advantages", "entropy", "reference" (log-probabilities of the
    weights before the first iteration), "behaviour" (log-probabilities of the policy that sampled)."""
    paired: ClassVar[bool] = False
    imitates: ClassVar[bool] = False
    trains_critic: ClassVar[bool] = False


PairLoss = PreferenceLoss | RewardModelLoss
PolicyLoss = Annotated[
    ClipLoss | SequenceClipLoss | ClippedWeightLoss | LikelihoodLoss | PairLoss | UserLoss, Field(discriminator="type")
]


class NoCorrection(Frozen):
    """The samples count as drawn from the trainer's own policy."""

    type: Literal["none"] = "none"
    """No correction."""


class TruncatedCorrection(Frozen):
    """Truncated importance sampling (TIS)."""

    type: Literal["truncate"] = "truncate"
    """The loss is weighted with the probability ratio trainer / behaviour, at most `limit`."""
    level: Level = "token"
    """Ratio of each token, the product over the response, or its geometric mean."""
    limit: float = Field(default=2.0, gt=0)
    """Largest weight."""


class MaskedCorrection(Frozen):
    """Importance sampling that leaves out ratios out of range (IcePop)."""

    type: Literal["mask"] = "mask"
    """A ratio trainer / behaviour outside `low` to `high` does not count."""
    level: Level = "token"
    """Ratio of each token, the product over the response, or its geometric mean. The last two leave out whole
    responses."""
    low: float = Field(default=0.5, ge=0)
    """Smallest ratio that counts."""
    high: float = Field(default=2.0, gt=0)
    """Largest ratio that counts."""
    weigh: bool = True
    """Weight a counted ratio with itself; false weighs all equally."""

    @model_validator(mode="after")
    def _ordered(self) -> "MaskedCorrection":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}: nothing would count")
        return self


Correction = Annotated[NoCorrection | TruncatedCorrection | MaskedCorrection, Field(discriminator="type")]
