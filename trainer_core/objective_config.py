"""Configuration of the policy objective. `docs/algorithms.md` has the formulas. Imports no torch."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from storage.errors import InputError
from trainer_core.effects import Unused, without_effect
from trainer_core.frozen import Frozen
from trainer_core.marks import RUNTIME

KlEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence", "group", "constant"]
Level = Literal["token", "sequence", "sequence_mean"]


class GroupAdvantage(Frozen):
    """Rewards relative to the prompt's group: GRPO, or Dr. GRPO with `normalize_by_std = false`."""

    type: Literal["grpo"] = "grpo"
    """GRPO: reward minus the group's mean, divided by the group's standard deviation if `normalize_by_std`."""


class LeaveOneOutAdvantage(Frozen):
    """Rewards relative to the other samples of the prompt (RLOO)."""

    type: Literal["rloo"] = "rloo"
    """RLOO: reward minus the mean of the group's other samples."""


class BatchAdvantage(Frozen):
    """Rewards normalised over all samples of an iteration (REINFORCE++)."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    """REINFORCE++: reward, centred and divided by the standard deviation over all trained tokens."""
    baseline: bool = False
    """Subtract the group's mean first (REINFORCE++-baseline)."""


Advantage = Annotated[GroupAdvantage | LeaveOneOutAdvantage | BatchAdvantage, Field(discriminator="type")]


class ClipLoss(Frozen):
    """PPO's clipped surrogate, with `clip_low` and `clip_high` of `[train.policy]`."""

    type: Literal["clip"] = "clip"
    """PPO's clipped surrogate; with `clip_high` above `clip_low` DAPO's."""
    dual_limit: float | None = Field(default=None, gt=1)
    """Dual clip: for a negative advantage A the loss is at most -A times this, such as 3; no limit if not given."""


class SequenceClipLoss(Frozen):
    """The clipped surrogate of whole sequences (GSPO)."""

    type: Literal["gspo"] = "gspo"
    """GSPO: one ratio for each sequence, the geometric mean over its tokens."""
    clip_low: float = Field(default=3e-4, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The ratio is clipped above at 1 + clip_high."""


class ClippedWeightLoss(Frozen):
    """REINFORCE with clipped importance weights (CISPO)."""

    type: Literal["cispo"] = "cispo"
    """CISPO: the ratio is a weight without gradient, clipped, so that no token loses its gradient."""
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is at least 1 - clip_low."""
    clip_high: float = Field(default=5.0, ge=0)
    """The weight is at most 1 + clip_high."""


class LikelihoodLoss(Frozen):
    """Maximum likelihood of the good samples (rejection sampling, filtered SFT)."""

    type: Literal["sft"] = "sft"
    """Negative log-likelihood of the samples that are kept."""
    above: float = 0.0
    """Keep the samples whose reward is above this."""
    best: bool = False
    """Of each prompt's kept samples keep only the one with the highest reward, the first if several have it."""


class PreferenceLoss(Frozen):
    """Direct preference optimisation on pairs of samples of one prompt (DPO)."""

    type: Literal["dpo"] = "dpo"
    """DPO: the sample with the higher reward is preferred."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull towards the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a preference is the wrong way round (conservative DPO)."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Of each prompt the best sample against the worst, or every pair with different rewards."""


PolicyLoss = Annotated[
    ClipLoss | SequenceClipLoss | ClippedWeightLoss | LikelihoodLoss | PreferenceLoss, Field(discriminator="type")
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
    """Whose ratio: each token's, the product over the response, or its geometric mean."""
    limit: float = Field(default=2.0, gt=0)
    """Largest weight."""


class MaskedCorrection(Frozen):
    """Importance sampling that leaves out what is out of range (IcePop)."""

    type: Literal["mask"] = "mask"
    """What has a ratio trainer / behaviour outside `low` to `high` does not count."""
    level: Level = "token"
    """Whose ratio: each token's, the product over the response, or its geometric mean. The last two leave out whole
    responses."""
    low: float = Field(default=0.5, ge=0)
    """Smallest ratio that counts."""
    high: float = Field(default=2.0, gt=0)
    """Largest ratio that counts."""
    weigh: bool = True
    """Weight what counts with its ratio; false weighs all of it equally."""

    @model_validator(mode="after")
    def _ordered(self) -> "MaskedCorrection":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}: nothing would count")
        return self


Correction = Annotated[NoCorrection | TruncatedCorrection | MaskedCorrection, Field(discriminator="type")]


class NoOverlong(Frozen):
    """Long responses are rewarded like others."""

    type: Literal["none"] = "none"
    """Rewards are as they were scored."""


class OverlongPenalty(Frozen):
    """A penalty that grows with the last tokens before the limit (DAPO)."""

    type: Literal["penalty"] = "penalty"
    """Subtract from the reward what grows linearly over the last `buffer` tokens before `length`."""
    length: int = Field(ge=1)
    """Response tokens from which the penalty is whole; usually `rollout.max_tokens`."""
    buffer: int = Field(ge=1)
    """Response tokens before `length` over which it grows from 0."""
    factor: float = Field(default=1.0, gt=0)
    """The whole penalty."""

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
    """Response tokens; usually `rollout.max_tokens`, which cuts off what is longer."""


Overlong = Annotated[NoOverlong | OverlongPenalty | OverlongLeftOut, Field(discriminator="type")]


class PolicyConfig(Frozen):
    """The policy objective: advantages, policy loss, KL to a reference, entropy. By default GRPO."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The probability ratio is clipped above at 1 + clip_high."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss; 0 needs no reference."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of that KL (Schulman, "Approximating KL divergence")."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where that KL counts: in the loss, or subtracted from the reward."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus, subtracted from the loss."""
    normalize_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO); False gives Dr. GRPO's advantages."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer updates per pass over the samples of an iteration."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of an iteration."""
    loss_aggregation: Aggregation = "token"
    """Mean over all response tokens of the mini-batch, or over sequences or prompt groups of the mean of each; with
    "constant" over sequences of the sum of each divided by `loss_length`."""
    loss_length: int | None = Field(default=None, ge=1)
    """Divisor of `loss_aggregation = "constant"` (Dr. GRPO), in tokens; usually `rollout.max_tokens`."""
    kl_sample: Annotated[int, RUNTIME] = Field(default=0, ge=0)
    """Samples of an iteration on which KL(before || after its updates) is measured, by a forward pass of their own."""
    old_policy: Literal["trainer", "behaviour"] = "trainer"
    """Whose log-probabilities are the old ones of the ratio: the trainer's before its updates, or those stored with the
    samples, of the policy that drew them."""
    leave_out_equal_groups: bool = False
    """Leave out prompts whose samples all have the same reward (DAPO's dynamic sampling): no mean is over them."""
    most_groups: int | None = Field(default=None, ge=1)
    """Train on at most so many prompts, the first that are left; all if not given."""
    advantage: Advantage = GroupAdvantage()
    """What a sample's reward is compared with."""
    loss: PolicyLoss = ClipLoss()
    """What is minimised."""
    correction: Correction = NoCorrection()
    """Importance sampling between the policy that drew the samples and the trainer's."""
    overlong: Overlong = NoOverlong()
    """How long responses are rewarded."""

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probabilities of a reference are part of the objective."""
        return self.kl_coefficient > 0 or self.loss.type == "dpo"

    @property
    def needs_behaviour(self) -> bool:
        """Whether the stored log-probabilities of the samples are part of the objective."""
        return self.old_policy == "behaviour" or self.correction.type != "none"

    @property
    def updates_once(self) -> bool:
        """Whether the policy that is trained is its own old policy: with a single update every ratio is 1."""
        return self.mini_batches * self.epochs == 1 and self.old_policy == "trainer"

    @model_validator(mode="after")
    def _takes_effect(self) -> "PolicyConfig":
        if found := without_effect(self, _UNUSED):
            raise ValueError("\n  ".join(found))
        if (self.loss_length is None) == (self.loss_aggregation == "constant"):
            raise ValueError('loss_length and loss_aggregation = "constant" need each other: give both, or neither')
        if self.old_policy == "behaviour" and self.correction.type != "none":
            raise ValueError(
                f'old_policy = "behaviour" already has that ratio, so correction.type = "{self.correction.type}" '
                "would count it twice: use one of them"
            )
        return self


def _with_loss(*types: str) -> Callable[[PolicyConfig], str | None]:
    return lambda policy: f'loss.type = "{policy.loss.type}"' if policy.loss.type in types else None


def _without_group(policy: PolicyConfig) -> str | None:
    return None if policy.advantage.type == "grpo" else f'advantage.type = "{policy.advantage.type}"'


def _without_kl(policy: PolicyConfig) -> str | None:
    return "kl_coefficient = 0" if policy.kl_coefficient == 0 else None


def _with_one_update(policy: PolicyConfig) -> str | None:
    single = 'mini_batches = 1, epochs = 1 and old_policy = "trainer", where every ratio is 1'
    return single if policy.updates_once else None


def _without_gradient(policy: PolicyConfig) -> str | None:
    """On average over samples of the policy k1 has no gradient (docs/algorithms.md)."""
    if policy.kl_estimator != "k1" or policy.kl_in == "reward":
        return None
    return 'kl_estimator = "k1" in the loss, where its gradient is 0 on average (take "k2", "k3" or kl_in = "reward")'


def _without_pairs(policy: PolicyConfig) -> str | None:
    """Samples with equal rewards make no pair anyway."""
    return 'loss.type = "dpo"' if policy.loss.type == "dpo" and policy.most_groups is None else None


_OF_CLIPPING = ("clip_low", "clip_high")
_OF_SAMPLING = ("advantage", "normalize_by_std", "old_policy", "correction", "kl_in")
_OF_TOKENS = ("kl_coefficient", "kl_estimator", "entropy_coefficient", "loss_aggregation", "loss_length")
_UNUSED: tuple[Unused[PolicyConfig], ...] = (
    *(Unused(name, _with_loss("gspo", "cispo", "sft", "dpo")) for name in _OF_CLIPPING),
    *(Unused(name, _with_loss("sft", "dpo")) for name in _OF_SAMPLING),
    *(Unused(name, _with_loss("dpo")) for name in _OF_TOKENS),
    Unused("normalize_by_std", _without_group),
    Unused("kl_in", _without_kl),
    Unused("kl_estimator", _without_kl),
    Unused("kl_coefficient", _without_gradient),
    *(Unused(name, _with_one_update) for name in (*_OF_CLIPPING, "loss.clip_low", "loss.clip_high", "loss.dual_limit")),
    Unused("leave_out_equal_groups", _without_pairs),
)
"""Settings that others leave without effect."""


def check_sampling(policy: PolicyConfig, top_p: float, where: str = "rollout.top_p") -> None:
    """Refuse stored log-probabilities that are another distribution's than the trainer's.

    They are those of the distribution that was sampled from. With `top_p` below 1 that is the nucleus, renormalised,
    while the trainer has the whole softmax: their ratio would be wrong by the nucleus' mass at every token.

    Args:
        policy: the objective.
        top_p: nucleus mass at which the samples were drawn.
        where: what to name in the message.

    Raises:
        InputError: the objective uses them, and `top_p` is below 1.
    """
    if top_p < 1 and policy.needs_behaviour:
        setting = "old_policy" if policy.old_policy == "behaviour" else "correction"
        raise InputError(
            f"{where} is {top_p}, so the samples' log-probabilities are those of a cut-off distribution, which "
            f"train.policy.{setting} cannot compare with the trainer's: set {where} to 1, or leave the setting out"
        )
