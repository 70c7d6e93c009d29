"""Log-probabilities, entropy and likeliest tokens of logits whose vocabulary is split over tensor-parallel ranks."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

EntropyUse = Literal["none", "reported", "differentiated"]
"""Use of the entropy: none, its value alone, or its gradient too."""

CHUNK_ELEMENTS = 1 << 25
"""Logits of a chunk: 128 MiB in float32. No other array of the vocabulary's width is made besides the gradient."""

FUSED_CHUNK_ELEMENTS = 1 << 30
"""Logits of a chunk that is one kernel, which makes no such array: few launches, and 32-bit offsets."""

_LOW = (1 << 32) - 1  # the low half of a key


def log_probabilities(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    entropy: EntropyUse = "none",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each position, under softmax(logits / temperature).

    Args:
        logits: (R, V_padded / tp), any floating type: this rank's columns; the ranks of `group` hold the others.
            They are never changed.
        targets: (R,) int64, token ids of the whole vocabulary.
        temperature: divides the logits; > 0.
        vocab_size: columns at and beyond it are padding and get no probability.
        group: the tensor-parallel group.
        entropy: its use; 0 if "none".

    Returns:
        Log-probabilities, which are differentiable, and entropies; both (R,) float32 (float64 for float64 logits), in
        nats, the same on every rank of the group.
    """
    return _VocabParallel.apply(  # pyright: ignore[reportReturnType]
        logits, targets, temperature, vocab_size, group, entropy
    )


def log_probabilities_at(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Differentiable log-probabilities of k tokens of each position, (R, k) int64 of the whole vocabulary, no token
    twice; (R, k), else as `log_probabilities`."""
    return _AtTokens.apply(logits, tokens, temperature, vocab_size, group)  # pyright: ignore[reportReturnType]


def likeliest(
    logits: torch.Tensor, count: int, among: int, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest of the first `among` tokens of the vocabulary at each position, the likeliest first, and
    their log-probabilities under the whole softmax: (R, count) int64 and (R, count) float32, without gradient; the
    logits and the rest are those of `log_probabilities`. Equal ones are in the order of their ids. `among` is at least
    `count`."""
    first, real = _columns(logits, vocab_size, group)
    own, _ = _statistics(logits[:, :real], temperature, False)
    allowed = logits[:, : max(min(among - first, real), 0)]
    keys = torch.full((len(logits), count), torch.iinfo(torch.int64).min, device=logits.device)
    for rows in _chunks(logits, CHUNK_ELEMENTS // 2):  # a key is twice as wide as a float
        found = _keys(allowed[rows], first).topk(min(count, allowed.shape[1]), dim=-1).values
        keys[rows, : found.shape[1]] = found
    if dist.get_world_size(group) > 1:
        keys = _gathered(keys, group)  # (R, count * tp)
    keys = keys.topk(count, dim=-1).values
    values = _flipped((keys >> 32).to(torch.int32)).view(torch.float32)
    return _LOW - (keys & _LOW), _scaled(values, temperature) - _normalizer_over(own, group).unsqueeze(-1)


class _AtTokens(torch.autograd.Function):
    """With l = log softmax(z / T), p = exp l and upstream gradients g_i of the k tokens:

    dz = (sum over i of g_i onehot(i) - p sum over i of g_i) / T."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        first, real = _columns(logits, vocab_size, group)
        is_local = (tokens >= first) & (tokens < first + real)
        index = torch.where(is_local, tokens - first, 0)  # (R, k)
        own, _ = _statistics(logits[:, :real], temperature, False)
        chosen = torch.where(is_local, _scaled(logits.gather(-1, index), temperature), 0.0)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(chosen, group=group)
        normalizer = _normalizer_over(own, group)
        chosen = chosen - normalizer.unsqueeze(-1)
        ctx.save_for_backward(logits, index, is_local, normalizer, chosen)
        ctx.temperature, ctx.real = temperature, real
        return chosen

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, index, is_local, normalizer, chosen = ctx.saved_tensors
        total = grads[0].sum(-1, keepdim=True)  # (R, 1)
        gradient = _filled(logits, ctx.real, _step, ctx.temperature, normalizer, total.squeeze(-1))
        # exact at the tokens, also where a probability is nearly 1 and the gradient is of low precision
        at_tokens = ((grads[0] - chosen.exp() * total) / ctx.temperature).to(logits.dtype)
        for column in range(index.shape[1]):
            place = slice(column, column + 1)
            _put(gradient, index[:, place], is_local[:, place], at_tokens[:, place])
        return gradient, None, None, None, None


class _VocabParallel(torch.autograd.Function):
    """With l = log softmax(z / T), p = exp l and H = -sum p l:

    d l[target] / dz = (onehot(target) - p) / T and dH / dz = -p (l + H) / T.

    Kept for the backward pass are the logits themselves and a few numbers for each position; p is computed again. The
    columns of a rank have a log-normalizer n and an entropy h of their own; with the whole normalizer N and
    f = exp(n - N), the whole entropy is the sum over ranks of f h - f log f."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup,
        entropy: EntropyUse,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, real = _columns(logits, vocab_size, group)
        is_local = (targets >= first) & (targets < first + real)
        index = torch.where(is_local, targets - first, 0)  # (R,)
        wanted = entropy != "none"
        own, own_entropy = _statistics(logits[:, :real], temperature, wanted)
        chosen = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).to(own.dtype) / temperature
        normalizer, sums = _combined(own, own_entropy, torch.where(is_local, chosen, 0.0), group)  # (R,), (2, R)
        chosen, whole_entropy = sums[0] - normalizer, sums[1] * wanted
        ctx.save_for_backward(logits, index, is_local, normalizer, chosen, whole_entropy)
        ctx.temperature, ctx.real, ctx.entropy = temperature, real, entropy
        if entropy != "differentiated":
            ctx.mark_non_differentiable(whole_entropy)
        return chosen, whole_entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, index, is_local, normalizer, chosen, entropy = ctx.saved_tensors
        grad_chosen, grad_entropy = grads  # (R,) each
        step = _step_with_entropy if ctx.entropy == "differentiated" else _step
        terms = (normalizer, grad_chosen, entropy, grad_entropy)
        gradient = _filled(logits, ctx.real, step, ctx.temperature, *terms)
        # at the targets 1 - p is needed exactly, also where p is nearly 1 and the gradient is of low precision
        at_target = -torch.expm1(chosen) * grad_chosen - chosen.exp() * grad_entropy * (chosen + entropy)
        at_target = (at_target / ctx.temperature).to(logits.dtype).unsqueeze(-1)  # (R, 1)
        _put(gradient, index.unsqueeze(-1), is_local.unsqueeze(-1), at_target)
        return gradient, None, None, None, None, None


def _columns(logits: torch.Tensor, vocab_size: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Token id of this rank's first column, and the number of its columns that are not padding."""
    first = logits.shape[-1] * dist.get_rank(group)
    return first, min(max(vocab_size - first, 0), logits.shape[-1])


def _filled(
    logits: torch.Tensor, real: int, step: Callable[..., None], temperature: float, *terms: torch.Tensor
) -> torch.Tensor:
    """Gradient (R, V/tp) that `step` fills in chunk by chunk, of (R,) terms; 0 at padding."""
    step, gradient = _kernel(step, logits), torch.empty_like(logits)
    gradient[:, real:] = 0
    for rows in _chunks(logits):
        columns = (one[rows].unsqueeze(-1) for one in terms)  # (C, 1)
        step(gradient[rows, :real], logits[rows, :real], temperature, *columns)
    return gradient


def _put(gradient: torch.Tensor, index: torch.Tensor, is_local: torch.Tensor, values: torch.Tensor) -> None:
    """Set the gradient of one column of each position, (R, 1), where this rank holds it."""
    gradient.scatter_(-1, index, torch.where(is_local, values, gradient.gather(-1, index)))


def _statistics(logits: torch.Tensor, temperature: float, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-normalizer and entropy (0 unless requested) over the given columns: (R, C) -> (R,), (R,)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    normalizer = logits.new_full(logits.shape[:1], -torch.inf, dtype=dtype)
    entropy = logits.new_zeros(logits.shape[:1], dtype=dtype)
    if not logits.shape[1]:  # this rank holds padding alone
        return normalizer, entropy
    measure = _kernel(_normalizer_and_entropy if with_entropy else _normalizer, logits)
    for rows in _chunks(logits):
        found = measure(logits[rows], temperature)
        normalizer[rows] = found[0]
        if with_entropy:
            entropy[rows] = found[1]
    return normalizer, entropy


def _combined(
    own: torch.Tensor, own_entropy: torch.Tensor, chosen: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole log-normalizer (R,), and sums over ranks of the targets' logits and of the entropy (2, R)."""
    normalizer = _normalizer_over(own, group)
    if dist.get_world_size(group) == 1:
        return normalizer, torch.stack((chosen, own_entropy))
    share = (own - normalizer).exp()
    sums = torch.stack((chosen, share * own_entropy + torch.special.entr(share)))
    dist.all_reduce(sums, group=group)
    return normalizer, sums


def _normalizer_over(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Whole log-normalizer (R,) of those of the ranks."""
    if dist.get_world_size(group) == 1:
        return own
    largest = own.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = (own - largest).exp()
    dist.all_reduce(total, group=group)
    return total.log() + largest


def _gathered(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(R, k) of each rank -> (R, k * ranks)."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _keys(logits: torch.Tensor, first: int) -> torch.Tensor:
    """(R, C) int64 that order tokens by their logits, as float32, and equal ones by their ids, the lower first: so the
    order does not depend on the layout. `first` is the id of the first column."""
    order = _flipped(logits.float().view(torch.int32)).to(torch.int64)
    return (order << 32) + (_LOW - first - torch.arange(logits.shape[1], device=logits.device))


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Bits of float32 -> int32 in the order of the numbers, and back."""
    return bits ^ ((bits >> 31) & torch.iinfo(torch.int32).max)


def _chunks(logits: torch.Tensor, elements: int | None = None) -> Iterator[slice]:
    if elements is None:
        elements = FUSED_CHUNK_ELEMENTS if _is_fused(logits) else CHUNK_ELEMENTS
    size = max(1, elements // max(1, logits.shape[1]))
    return (slice(first, first + size) for first in range(0, logits.shape[0], size))


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1 else wide / temperature


def _normalizer(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor]:
    return (torch.logsumexp(_scaled(logits, temperature), -1),)


def _normalizer_and_entropy(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = _scaled(logits, temperature)
    largest = scaled.amax(-1)
    below = scaled - largest.unsqueeze(-1)
    parts = below.exp()
    total = parts.sum(-1)
    return largest + total.log(), total.log() - (parts * below).sum(-1) / total


def _step(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    temperature: float,
    normalizer: torch.Tensor,
    grad: torch.Tensor,
    *_: torch.Tensor,
) -> None:
    """Fill in the gradient of a chunk, without the terms of its targets."""
    probs = (_scaled(logits, temperature) - normalizer).exp()
    gradient.copy_(probs * (-grad / temperature))


def _step_with_entropy(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    temperature: float,
    normalizer: torch.Tensor,
    grad: torch.Tensor,
    entropy: torch.Tensor,
    grad_entropy: torch.Tensor,
) -> None:
    log_probs = _scaled(logits, temperature) - normalizer
    weights = (grad + grad_entropy * (log_probs + entropy)) / -temperature
    gradient.copy_(log_probs.exp() * weights)


def _kernel(function: Callable[..., Any], logits: torch.Tensor) -> Callable[..., Any]:
    return _compiled(function) if _is_fused(logits) else function


def _is_fused(logits: torch.Tensor) -> bool:
    """On a GPU the steps of a chunk become one kernel, unless results must not depend on how kernels are tuned."""
    return logits.is_cuda and not torch.are_deterministic_algorithms_enabled()


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
