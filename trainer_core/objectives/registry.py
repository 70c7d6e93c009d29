"""The objectives by their `type`, in one table. Imports no torch and no numpy.

An advantage is a function of `Scored`, a loss one of `Tokens`; both take the settings of their table as keywords.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trainer_core.objectives.objective_config import PolicyConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainer_core.objectives.scored import Scored
    from trainer_core.objectives.tokens import TokenLoss, Tokens


class Advantage(Protocol):
    """An advantage: (N,) float32, one value a sample, or (R,), one a response token."""

    def __call__(self, scored: "Scored", /) -> "NDArray[np.float32]":
        """Advantages of the samples of an iteration."""
        ...


class Loss(Protocol):
    """A loss, as a function of the response tokens of one micro-batch on one rank."""

    def __call__(self, tokens: "Tokens", /) -> "TokenLoss":
        """Loss of each response token, (R,) float32, with the gradient of `tokens.logprobs`."""
        ...


ADVANTAGES: Mapping[str, str] = {
    "grpo": "trainer_core.objectives.advantages:group_advantages",
    "rloo": "trainer_core.objectives.advantages:leave_one_out_advantages",
    "reinforce_pp": "trainer_core.objectives.advantages:batch_advantages",
    "custom": "trainer_core.objectives.custom:user_advantage",
}
LOSSES: Mapping[str, str] = {
    "clip": "trainer_core.objectives.losses:clipped_surrogate",
    "gspo": "trainer_core.objectives.losses:sequence_surrogate",
    "cispo": "trainer_core.objectives.losses:clipped_weight_loss",
    "sft": "trainer_core.objectives.losses:likelihood_loss",
    "dpo": "trainer_core.objectives.losses:preference_loss",
    "custom": "trainer_core.objectives.custom:user_loss",
}
"""Functions by the `type` of `train.policy.advantage` and `train.policy.loss`."""


def advantage_of(policy: PolicyConfig) -> Advantage:
    """Advantage of a configuration, with its settings bound."""
    return _bound(ADVANTAGES[policy.advantage.type], policy.advantage_keywords)


def loss_of(policy: PolicyConfig) -> Loss:
    """Loss of a configuration, with its settings bound."""
    return _bound(LOSSES[policy.loss.type], policy.loss_keywords)


def _bound(function: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return partial(vars(importlib.import_module(module))[name], **arguments)
