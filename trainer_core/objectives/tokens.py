"""The response tokens that a loss sees, and the loss that it returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from storage.errors import InputError

LOG_RATIO_LIMIT = 20.0
"""Largest |log-ratio| that enters a loss, in nats: exp(20) is 5e8, while float32 overflows at 88."""


def bounded_log_ratio(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """upper - lower, clamped to +-LOG_RATIO_LIMIT, beyond which no gradient flows."""
    return (upper - lower).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each response token, and a value for the report, both (R,) float32."""

    loss: torch.Tensor
    """To be summed over each sequence with the sequence's weight, and minimised."""
    clipped: torch.Tensor
    """1 where the clipped branch of the surrogate was taken, so that no gradient flows."""


@dataclass(frozen=True)
class Segments:
    """Assignment of R flat response tokens to S sequences."""

    lengths: torch.Tensor
    """(S,) int64, tokens of each sequence that this rank holds; they sum to R."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the other tokens of the sequences, if there are any."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (S,), over the tokens of all ranks; differentiable. Collective in `group`."""
        own = self.own_sum(values)
        return own if self.group is None else _SumOverRanks.apply(own, self.group)  # pyright: ignore[reportReturnType]

    def own_sum(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (S,), over the tokens of this rank alone; differentiable."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True, initial=0)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (S,), differentiable; 0 for a sequence without tokens."""
        return self.sum(values) / self.sum(torch.ones_like(values)).clamp(min=1)

    def spread(self, values: torch.Tensor, tokens: int) -> torch.Tensor:
        """(S,) -> (R,), each sequence's value for every one of its `tokens` = R tokens; differentiable."""
        return torch.repeat_interleave(values, self.lengths, output_size=tokens)  # without its size it would wait


@dataclass(frozen=True)
class Tokens:
    """R response tokens of a micro-batch on this rank; tensors are (R,) float32, log-probabilities in nats."""

    logprobs: torch.Tensor
    """By the policy that is trained, with its gradient."""
    responses: Segments
    """The responses that the tokens belong to."""
    values: Mapping[str, torch.Tensor]
    """The other values by name; those that the objective does not need are missing."""

    @property
    def advantages(self) -> torch.Tensor:
        """Advantage of each token."""
        return self._needed("advantages", "advantages")

    @property
    def old_logprobs(self) -> torch.Tensor:
        """By the policy before the iteration's updates, or with `old_policy = "behaviour"` by the one that sampled.
        Before the first update these are the current values: every ratio is 1, with the gradient of `logprobs`."""
        return self.values.get("old_logprobs", self.logprobs.detach())

    @property
    def behaviour_logprobs(self) -> torch.Tensor:
        """By the policy that sampled the tokens."""
        return self._needed("behaviour_logprobs", "behaviour")

    @property
    def reference_logprobs(self) -> torch.Tensor:
        """By the weights before the first iteration."""
        return self._needed("reference_logprobs", "reference")

    @property
    def entropy(self) -> torch.Tensor:
        """Entropy of the distribution that each token is drawn from, in nats, with its gradient."""
        return self._needed("entropy", "entropy")

    @property
    def log_ratio(self) -> torch.Tensor:
        """`logprobs` - `old_logprobs`, bounded."""
        return bounded_log_ratio(self.logprobs, self.old_logprobs)

    def _needed(self, name: str, need: str) -> torch.Tensor:
        if name not in self.values:
            fact = f"the loss reads tokens.{name}, which train.policy.loss.needs does not name"
            raise InputError(f"{fact}: add {need!r} to it")
        return self.values[name]


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, each of which uses it in a loss of its own; the sum of these losses is minimised. The gradient of
    a rank's summand is therefore the sum of the gradients of all ranks."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.group = group
        return _added(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _added(grads[0], ctx.group), None


def _added(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total
