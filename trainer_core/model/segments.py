"""Sums over the segments of flat response tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Segments:
    """Which of R flat response tokens belong to which of S sequences."""

    lengths: torch.Tensor
    """(S,) int64, tokens of each sequence; they sum to R."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (S,), differentiable. A layout that divides sequences over ranks adds its partial sums here."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True, initial=0)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (S,), differentiable; 0 for a sequence without tokens."""
        return self.sum(values) / self.sum(torch.ones_like(values)).clamp(min=1)

    def spread(self, values: torch.Tensor, tokens: int) -> torch.Tensor:
        """(S,) -> (R,), each sequence's value for every one of its `tokens` = R tokens; differentiable."""
        return torch.repeat_interleave(values, self.lengths, output_size=tokens)  # without its size it would wait
