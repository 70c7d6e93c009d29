"""Sums over the segments of flat response tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Segments:
    """Which of R flat response tokens belong to which of S sequences."""

    lengths: torch.Tensor
    """(S,) int64, tokens of each sequence that this rank holds; they sum to R."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the other tokens of the sequences, if there are any."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (S,), over the tokens of all ranks; differentiable. Collective in `group`."""
        return _summed(self.own_sum(values), self.group)

    def own_sum(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (S,), over the tokens of this rank alone; differentiable."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True, initial=0)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (S,), differentiable; 0 for a sequence without tokens."""
        return self.sum(values) / self.sum(torch.ones_like(values)).clamp(min=1)

    def spread(self, values: torch.Tensor, tokens: int) -> torch.Tensor:
        """(S,) -> (R,), each sequence's value for every one of its `tokens` = R tokens; differentiable."""
        return torch.repeat_interleave(values, self.lengths, output_size=tokens)  # without its size it would wait


def _summed(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return values if group is None else _SumOverRanks.apply(values, group)  # pyright: ignore[reportReturnType]


class _SumOverRanks(torch.autograd.Function):
    """Each rank uses the sum in a loss of its own, and what is minimised is the sum of their losses: the gradient of
    what a rank adds is the sum of the gradients that all ranks find."""

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
