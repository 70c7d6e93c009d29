"""Configuration of optimizers: that of every phase of training, and all by which a critic learns. Imports no torch."""

import operator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer_core.effects import Unused, without_effect
from trainer_core.frozen import Frozen
from trainer_core.marks import FILES


class OptimizerConfig(Frozen):
    """AdamW and its learning-rate schedule; one step of the schedule is one optimizer update."""

    learning_rate: float = Field(ge=0)
    """Peak learning rate, reached at the end of the warm-up."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate at and after `decay_steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning-rate decay after the warm-up."""
    decay_steps: int = Field(default=1_000_000, ge=1)
    """Updates, warm-up included, until the decay ends."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 disables clipping."""

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> "OptimizerConfig":
        if self.warmup_steps >= self.decay_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be below decay_steps {self.decay_steps}")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}")
        if found := without_effect(self, _UNUSED):
            raise ValueError("\n  ".join(found))
        return self


def _without_decay(config: OptimizerConfig) -> str | None:
    return 'decay = "constant"' if config.decay == "constant" else None


_UNUSED: tuple[Unused[OptimizerConfig], ...] = (
    Unused("min_learning_rate", _without_decay),
    Unused("decay_steps", _without_decay),
    Unused(
        "decay",
        lambda config: (
            "min_learning_rate = learning_rate" if config.min_learning_rate == config.learning_rate else None
        ),
    ),
)


class CriticConfig(OptimizerConfig):
    """The critic of PPO: a model in the policy's layout that ends with one number for each position. It begins with the
    policy's weights after the warm-up, or those of `source`, estimates the return of each token, and has its own AdamW.
    """

    source: Annotated[str | None, FILES] = Field(default=None, exclude_if=operator.not_)
    """Hugging Face directory that the critic begins with, as `model.source`, in place of the policy's weights: of a
    sequence classifier with one label, such as a reward model, or of a language model, with a value of 0 everywhere. It
    may be of another family and size, with the tokenizer of the trained model. The run stores it."""
    mini_batches: int = Field(default=1, ge=1)
    """Updates of the critic per pass over the samples of an iteration."""
    epochs: int = Field(default=1, ge=1)
    """Its passes over the samples of an iteration."""
    clip_values: float | None = Field(default=None, gt=0)
    """Largest change of a value within an iteration that lowers the loss; without it there is no limit."""
    updates_alone: int = Field(default=0, ge=0)
    """Updates of the critic before the policy's first: in an iteration that begins with fewer, it alone learns."""

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig.model_validate(self.model_dump(include=set(OptimizerConfig.model_fields)))

    @property
    def of_returns(self) -> str | None:
        """The setting that only a critic of returns reads, if one is set: no reward model does."""
        return next((name for name in ("clip_values", "updates_alone") if dict(self)[name]), None)

    @model_validator(mode="after")
    def _limits_a_change(self) -> "CriticConfig":
        if self.clip_values is not None and self.mini_batches * self.epochs == 1:
            fact = f"clip_values = {self.clip_values} has no effect with mini_batches = 1 and epochs = 1"
            raise ValueError(f"{fact}, where no value has changed: leave it out, or raise one of the two")
        return self
