"""Log-probabilities and entropy of logits whose vocabulary is split over tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

_PADDING_LOGIT = -1e9


def log_probabilities(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each position, under softmax(logits / temperature).

    Args:
        logits: (B, S, V_padded / tp), any floating type: this rank's columns; the ranks of `group` hold the others.
        targets: (B, S) int64, token ids of the whole vocabulary.
        temperature: divides the logits; > 0.
        vocab_size: columns at and beyond it are padding and get no probability.
        group: the tensor-parallel group.

    Returns:
        Log-probabilities and entropies, (B, S) float32, in nats, the same on every rank of the group, differentiable.
    """
    return _VocabParallel.apply(logits, targets, temperature, vocab_size, group)  # pyright: ignore[reportReturnType]


class _VocabParallel(torch.autograd.Function):
    """With l = log softmax(z / T), p = exp l and H = -sum p l:

    d l[target] / dz = (onehot(target) - p) / T and dH / dz = -p (l + H) / T.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = logits.shape[-1]
        first = columns * dist.get_rank(group)
        scaled = _without_padding(logits.float() / temperature, vocab_size - first)  # (B, S, V/tp)
        log_probs = scaled - _log_normalizer(scaled, group).unsqueeze(-1)  # (B, S, V/tp)
        is_local = (targets >= first) & (targets < first + columns)
        index = torch.where(is_local, targets - first, 0).unsqueeze(-1)  # (B, S, 1)
        chosen = torch.where(is_local, log_probs.gather(-1, index).squeeze(-1), 0.0)  # (B, S)
        entropy = torch.special.entr(log_probs.exp()).sum(-1)  # (B, S)
        sums = torch.stack((chosen, entropy))  # (2, B, S)
        dist.all_reduce(sums, group=group)
        chosen, entropy = sums.unbind()
        ctx.save_for_backward(log_probs, index, is_local, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype  # pyright: ignore[reportAttributeAccessIssue]
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_probs, index, is_local, entropy = ctx.saved_tensors
        grad_chosen, grad_entropy = (grad.unsqueeze(-1) for grad in grads)  # (B, S, 1)
        probs = log_probs.exp()
        grad = -probs * (grad_chosen + grad_entropy * (log_probs + entropy.unsqueeze(-1)))  # (B, S, V/tp)
        grad.scatter_add_(-1, index, grad_chosen * is_local.unsqueeze(-1))
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None


def _without_padding(scaled: torch.Tensor, real_columns: int) -> torch.Tensor:
    """Give padded columns a logit so low that their probability is 0, yet finite, so that 0 * logit * gradient is 0."""
    if real_columns >= scaled.shape[-1]:
        return scaled
    is_padding = torch.arange(scaled.shape[-1], device=scaled.device) >= real_columns
    return scaled.masked_fill(is_padding, _PADDING_LOGIT)


def _log_normalizer(scaled: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """log of the sum over the whole vocabulary of exp(scaled): (B, S, V/tp) -> (B, S)."""
    largest = scaled.amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = (scaled - largest.unsqueeze(-1)).exp().sum(-1)
    dist.all_reduce(total, group=group)
    return total.log() + largest
