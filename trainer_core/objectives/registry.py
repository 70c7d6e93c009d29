"""The objectives by their `type`, in one table. Imports no torch and no numpy.

An advantage is a function of `ScoredSamples`, a loss one of `Tokens`; both take settings as keywords."""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trainer_core.frozen import Frozen
from trainer_core.objectives.objective_config import PolicyConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainer_core.objectives.scored import ScoredSamples
    from trainer_core.objectives.tokens import TokenLoss, Tokens


class Advantage(Protocol):
    """An advantage: (N,) float32, one value a sample, or (R,), one a response token."""

    def __call__(self, scored: "ScoredSamples", /) -> "NDArray[np.float32]":
        """Advantages of the samples of an iteration."""
        ...


class Loss(Protocol):
    """A loss, as a function of the response tokens of one micro-batch on one rank."""

    def __call__(self, tokens: "Tokens", /) -> "TokenLoss":
        """Loss of each response token, (R,) float32, with the gradient of `tokens.logprobs`."""
        ...


Entry = tuple[str, tuple[str, ...]]
"""Place of a function, and the settings of its table, or of `train.policy`, that it takes as keywords."""

ADVANTAGES: Mapping[str, Entry] = {
    "grpo": ("trainer_core.objectives.advantages:group_advantages", ("normalize_by_std",)),
    "rloo": ("trainer_core.objectives.advantages:leave_one_out_advantages", ()),
    "reinforce_pp": ("trainer_core.objectives.advantages:batch_advantages", ("baseline",)),
    "gae": ("trainer_core.objectives.advantages:generalized_advantages", ("gamma", "gae_lambda", "normalize")),
    "custom": ("trainer_core.objectives.custom:user_advantage", ("code",)),
}
LOSSES: Mapping[str, Entry] = {
    "clip": ("trainer_core.objectives.losses:clipped_surrogate", ("clip_low", "clip_high", "dual_limit")),
    "gspo": ("trainer_core.objectives.losses:sequence_surrogate", ("clip_low", "clip_high")),
    "cispo": ("trainer_core.objectives.losses:clipped_weight_loss", ("clip_low", "clip_high")),
    "sft": ("trainer_core.objectives.losses:likelihood_loss", ()),
    "dpo": ("trainer_core.objectives.losses:preference_loss", ()),
    "reward_model": ("trainer_core.objectives.losses:preference_loss", ()),
    "custom": ("trainer_core.objectives.custom:user_loss", ("code",)),
}
"""Functions by the `type` of `train.policy.advantage` and `train.policy.loss`; `code` is the whole table."""


def advantage_of(policy: PolicyConfig) -> Advantage:
    return _bound(ADVANTAGES[policy.advantage.type], policy, policy.advantage)


def loss_of(policy: PolicyConfig) -> Loss:
    return _bound(LOSSES[policy.loss.type], policy, policy.loss)


def _bound(entry: Entry, policy: Frozen, table: Frozen) -> Callable[..., Any]:
    (place, names), settings = entry, {**dict(policy), **dict(table), "code": table}
    module, _, function = place.partition(":")
    return partial(vars(importlib.import_module(module))[function], **{name: settings[name] for name in names})
