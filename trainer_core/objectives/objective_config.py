"""Configuration of the policy objective. `docs/algorithms.md` has the formulas. Imports no torch."""

import operator
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from storage.errors import InputError
from trainer_core.effects import Unused, without_effect
from trainer_core.frozen import Frozen
from trainer_core.marks import FILES, RUNTIME
from trainer_core.objectives.advantage_config import Advantage, GroupAdvantage, NoOverlong, Overlong, OverlongPenalty
from trainer_core.objectives.loss_config import ClipLoss, Correction, LossTable, NoCorrection, PolicyLoss, UserLoss

KlEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence", "group", "constant"]

_OF_CLIPPING = ("clip_low", "clip_high")
_OF_ADVANTAGES = ("advantage", "normalize_by_std", "kl_in", "distill")
_OF_REWARDS = ("advantage", "normalize_by_std", "kl_in", "leave_out_equal_groups")
_OF_SAMPLING = ("old_policy", "correction")
_OF_UPDATES = ("mini_batches", "epochs", "kl_sample")
_OF_TOKENS = ("kl_coefficient", "kl_estimator", "entropy_coefficient", "loss_aggregation", "loss_length")


class DistillConfig(Frozen):
    """On-policy distillation: a teacher scores the tokens that the policy has sampled, and what it finds likelier or
    less likely than the policy is their advantage; or with `top_k` its likeliest tokens there are compared with the
    policy's, in the loss."""

    teacher: Annotated[str, FILES]
    """Hugging Face directory of the teacher, as `model.source`, with the tokenizer of the trained model. The run stores
    a copy of it."""
    coefficient: float = Field(default=1.0, gt=0)
    """Factor of log teacher - log policy of a sampled token in its advantage, or with `top_k` of the KL in the loss."""
    # a run without it does not have the key in its meaning
    top_k: int = Field(default=0, ge=0, exclude_if=operator.not_)
    """Likeliest tokens of the teacher whose probabilities are compared at each sampled token, with all others as one;
    0 compares the sampled token alone."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Factor of the advantage from rewards, which is added; 0 trains without rewards, and nothing is scored for it."""


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
    """Place of that KL: in the loss, or subtracted from the reward."""
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
    """Old log-probabilities of the ratio: the trainer's before its updates, or those stored with the samples, of the
    policy that drew them."""
    leave_out_equal_groups: bool = False
    """Leave out prompts whose samples all have the same reward (DAPO's dynamic sampling): no mean is over them."""
    most_groups: int | None = Field(default=None, ge=1)
    """Most prompts to train on, the first that remain; all if not given."""
    advantage: Advantage = GroupAdvantage()
    """Comparison of a sample's reward."""
    loss: PolicyLoss = ClipLoss()
    """Loss of a response token."""
    correction: Correction = NoCorrection()
    """Importance sampling between the policy that drew the samples and the trainer's."""
    overlong: Overlong = NoOverlong()
    """Rewards of long responses."""
    # a run without it does not have the key in its meaning
    distill: DistillConfig | None = Field(default=None, exclude_if=operator.not_)
    """Learn from a teacher's probabilities of the sampled tokens."""

    @property
    def runs_user_code(self) -> bool:
        """Code of the user's own is part of the objective."""
        return self.advantage.runs_user_code or self.loss.runs_user_code

    @property
    def needs_reference(self) -> bool:
        """The log-probabilities of a reference are part of the objective."""
        return self.kl_coefficient > 0 or "reference" in self.loss.needs

    @property
    def needs_advantages(self) -> bool:
        """Rewards become advantages, which weigh ratios to the policy that sampled: samples are taken for its own."""
        return "advantages" in self.loss.needs and not self.compares_alone

    @property
    def compares_top(self) -> bool:
        """The teacher's likeliest tokens are compared with the policy's."""
        return self.distill is not None and self.distill.top_k > 0

    @property
    def compares_alone(self) -> bool:
        """That comparison is the whole objective, but for KL and entropy."""
        return self.compares_top and not self.needs_rewards

    @property
    def needs_rewards(self) -> bool:
        """Rewards are part of the objective: not if it distils alone."""
        return self.distill is None or self.distill.reward_weight > 0

    @property
    def needs_values(self) -> bool:
        """The values of a critic are part of the objective."""
        weighed = self.needs_advantages and self.needs_rewards and self.advantage.needs_values
        return weighed or self.loss.trains_critic

    @property
    def needs_entropy(self) -> bool:
        """The entropy is part of the loss."""
        return self.entropy_coefficient != 0 or "entropy" in self.loss.needs

    @property
    def corrects(self) -> bool:
        """A correction weighs the loss."""
        return not isinstance(self.correction, NoCorrection)

    @property
    def weighs_behaviour(self) -> bool:
        """The stored log-probabilities of the samples enter beside the old ones of the ratio."""
        return self.corrects or "behaviour" in self.loss.needs

    @property
    def needs_behaviour(self) -> bool:
        """The stored log-probabilities of the samples are part of the objective."""
        return self.old_policy == "behaviour" or self.weighs_behaviour

    @property
    def updates_once(self) -> bool:
        """The trained policy is its own old policy: with a single update every ratio is 1."""
        return self.mini_batches * self.epochs == 1 and self.old_policy == "trainer"

    @property
    def scores_first(self) -> bool:
        """A scoring pass before the first update finds values of the loss."""
        distils = self.distill is not None and not self.compares_top and self.old_policy == "trainer"
        return self.loss.paired or distils or (self.kl_coefficient > 0 and self.kl_in == "reward")

    @property
    def method(self) -> str:
        """Name of the objective in a model card."""
        return "grpo" if isinstance(self.loss, ClipLoss) else self.loss.type

    @property
    def compares(self) -> str | None:
        """Setting under which a sample that is alone in its group teaches nothing; None if there is none."""
        if self.leave_out_equal_groups:
            return "leave_out_equal_groups = true"
        if self.loss.paired:
            return f'loss.type = "{self.loss.type}"'
        return self.advantage.compares if self.needs_advantages and self.needs_rewards else None

    @model_validator(mode="after")
    def _takes_effect(self) -> "PolicyConfig":
        if found := without_effect(self, _UNUSED):
            raise ValueError("\n  ".join(found))
        if (self.loss_length is None) == (self.loss_aggregation == "constant"):
            raise ValueError('loss_length and loss_aggregation = "constant" need each other: give both, or neither')
        if self.old_policy == "behaviour" and self.corrects:
            raise ValueError(
                f'old_policy = "behaviour" already has that ratio, so correction.type = "{self.correction.type}" '
                "would count it twice: use one of them"
            )
        return self


def _with_loss(without: Callable[[LossTable | UserLoss], bool]) -> Callable[[PolicyConfig], str | None]:
    return lambda policy: f'loss.type = "{policy.loss.type}"' if without(policy.loss) else None


def _under(applies: Callable[[PolicyConfig], bool], what: str) -> Callable[[PolicyConfig], str | None]:
    return lambda policy: what if applies(policy) else None


def _without_group(policy: PolicyConfig) -> str | None:
    grouped = isinstance(policy.advantage, GroupAdvantage)
    return None if grouped else f'advantage.type = "{policy.advantage.type}"'


def _unrewarded_penalty(policy: PolicyConfig) -> str | None:
    return _distilled_alone(policy) if isinstance(policy.overlong, OverlongPenalty) else None


_distilled_alone = _under(lambda policy: not policy.needs_rewards, "distill.reward_weight = 0")
_compared_alone = _under(lambda policy: policy.compares_alone, "distill.top_k and distill.reward_weight = 0")
_without_kl = _under(lambda policy: policy.kl_coefficient == 0, "kl_coefficient = 0")
_with_one_update = _under(
    lambda policy: policy.updates_once,
    'mini_batches = 1, epochs = 1 and old_policy = "trainer", where every ratio is 1',
)
_without_gradient = _under(  # on average over samples of the policy k1 has none (docs/algorithms.md)
    lambda policy: policy.kl_estimator == "k1" and policy.kl_in == "loss",
    'kl_estimator = "k1" in the loss, where its gradient is 0 on average (take "k2", "k3" or kl_in = "reward")',
)


_paired = _with_loss(lambda loss: loss.paired)
_UNUSED: tuple[Unused[PolicyConfig], ...] = (
    *(Unused(name, _with_loss(lambda loss: not isinstance(loss, ClipLoss))) for name in _OF_CLIPPING),
    *(Unused(name, _with_loss(lambda loss: "advantages" not in loss.needs)) for name in _OF_ADVANTAGES),
    *(Unused(name, _with_loss(lambda loss: loss.imitates or loss.paired)) for name in _OF_SAMPLING),
    *(Unused(name, _paired) for name in _OF_TOKENS),
    *(Unused(name, _with_loss(lambda loss: loss.trains_critic)) for name in _OF_UPDATES),
    *(Unused(name, _distilled_alone) for name in _OF_REWARDS),
    *(Unused(name, _compared_alone) for name in ("loss", *_OF_CLIPPING, *_OF_SAMPLING)),
    Unused("overlong", _unrewarded_penalty),
    Unused("normalize_by_std", _without_group),
    Unused("kl_in", _without_kl),
    Unused("kl_estimator", _without_kl),
    Unused("kl_coefficient", _without_gradient),
    *(Unused(name, _with_one_update) for name in (*_OF_CLIPPING, "loss.clip_low", "loss.clip_high", "loss.dual_limit")),
    Unused(  # samples with equal rewards make no pair anyway
        "leave_out_equal_groups", lambda policy: _paired(policy) if policy.most_groups is None else None
    ),
)
"""Settings that others leave without effect."""


def check_sampling(policy: PolicyConfig, value: float, where: str, whole: float) -> None:
    """Refuse stored log-probabilities of another distribution than the trainer's. The engine stores those of the
    distribution that it sampled from. If a setting such as `top_p` cuts tokens off, this is what remains, renormalised;
    the trainer computes the whole softmax. Their ratio would be wrong by the mass of what remains at each token. Raises
    InputError: the objective uses them, and the `value` of the setting `where` is not `whole`, which cuts nothing off.
    """
    if value != whole and policy.needs_behaviour:
        setting = "old_policy" if policy.old_policy == "behaviour" else "correction"
        raise InputError(
            f"{where} is {value}, so the samples' log-probabilities are those of a cut-off distribution, which "
            f"train.policy.{setting} cannot compare with the trainer's: set {where} to {whole}, or leave that out"
        )
