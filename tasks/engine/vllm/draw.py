"""Tokens and their log-probabilities from logits on a card, by the noise of `tasks.engine.vllm.counter`: the logits are
read once and copied nowhere, and a token's rank among all is not counted. Imports Triton."""

import torch
import triton
import triton.language as tl

from tasks.engine.vllm.counter import LANE

_TILE = 4096  # entries of the vocabulary for one program
_LANE, _SCALE = tl.constexpr(LANE), tl.constexpr(4.6566127342e-10)  # as in `counter`


def draw(
    logits: torch.Tensor, rows: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens with the largest sums of logit and noise, the first among equal ones, (S,) int64, and their
    log-probabilities, (S,) float32, nat. `logits`, (S, V), are already divided by the temperature, and -inf where they
    must not be chosen; `rows`, (S,), are those of each sample in `seeds` and `temperatures`, and `positions`, (S,),
    those of the last tokens before. A temperature of 0 chooses the likeliest token."""
    count, vocabulary = logits.shape
    tiles = -(-vocabulary // _TILE)
    # best sum, its token, largest logit, sum of exponentials below it: of each tile
    parts = torch.empty((count, 3, tiles), dtype=torch.float32, device=logits.device)
    best = torch.empty((count, tiles), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
    _tile_kernel[(count, tiles)](
        parts, best, logits, logits.stride(0), rows, seeds, positions, temperatures, vocabulary, tiles,
        size=_TILE, num_warps=8,  # pyright: ignore[reportCallIssue] - Triton's own
    )  # fmt: skip
    _choice_kernel[(count,)](
        tokens, logprobs, parts, best, logits, logits.stride(0), vocabulary, tiles,
        padded=triton.next_power_of_2(tiles), num_warps=1,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _noise(word: tl.tensor) -> tl.tensor:
    """Gumbel noise of words of 32 bits."""
    drawn = word.to(tl.int32, bitcast=True)
    uniform = tl.maximum((drawn ^ (drawn >> 31)).to(tl.float32) * _SCALE, _SCALE)
    rest = 1.0 - uniform
    # log1p(-uniform) by Kahan's formula, which makes good for what `rest` has lost
    return -tl.log(tl.where(rest == 1.0, uniform, tl.log(rest) * (uniform / (rest - 1.0))))


@triton.jit
def _four(line: tl.tensor, entry: tl.tensor, vocabulary: tl.tensor) -> tuple[tl.tensor, ...]:
    """Logits of the entries for the words of counters."""
    e1, e2, e3 = entry + _LANE, entry + 2 * _LANE, entry + 3 * _LANE
    l0 = tl.load(line + entry, mask=entry < vocabulary, other=float("-inf")).to(tl.float32)
    l1 = tl.load(line + e1, mask=e1 < vocabulary, other=float("-inf")).to(tl.float32)
    l2 = tl.load(line + e2, mask=e2 < vocabulary, other=float("-inf")).to(tl.float32)
    l3 = tl.load(line + e3, mask=e3 < vocabulary, other=float("-inf")).to(tl.float32)
    return l0, l1, l2, l3


@triton.jit
def _largest(l0: tl.tensor, l1: tl.tensor, l2: tl.tensor, l3: tl.tensor) -> tl.tensor:
    return tl.max(tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3)), axis=0)


@triton.jit
def _tile_kernel(
    parts: tl.tensor,
    best: tl.tensor,
    logits: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    vocabulary: tl.tensor,
    tiles: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Choose within a tile of `size` entries."""
    sample, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + sample)
    counters = tile * (size // 4) + tl.arange(0, size // 4)
    entry = (counters // _LANE) * (4 * _LANE) + counters % _LANE  # of the first word
    l0, l1, l2, l3 = _four(logits + sample * stride, entry, vocabulary)  # pyright: ignore[reportGeneralTypeIssues]
    largest = _largest(l0, l1, l2, l3)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(l0 - base) + tl.exp(l1 - base) + tl.exp(l2 - base) + tl.exp(l3 - base), axis=0)
    if tl.load(temperatures + row) != 0.0:
        seed, position = tl.load(seeds + row), tl.load(positions + sample)
        first = counters.to(tl.uint32)
        zero = first * 0
        second = zero + position.to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, first, second, zero, zero)
        l0, l1, l2, l3 = l0 + _noise(w0), l1 + _noise(w1), l2 + _noise(w2), l3 + _noise(w3)
    value = _largest(l0, l1, l2, l3)
    last = vocabulary - 1  # where no logit is a number
    f0, f1 = tl.where(l0 == value, entry, last), tl.where(l1 == value, entry + _LANE, last)
    f2, f3 = tl.where(l2 == value, entry + 2 * _LANE, last), tl.where(l3 == value, entry + 3 * _LANE, last)
    tl.store(best + sample * tiles + tile, tl.min(tl.minimum(tl.minimum(f0, f1), tl.minimum(f2, f3)), axis=0))
    part = parts + sample * 3 * tiles + tile
    tl.store(part, value)
    tl.store(part + tiles, largest)
    tl.store(part + 2 * tiles, total)


@triton.jit
def _choice_kernel(
    tokens: tl.tensor,
    logprobs: tl.tensor,
    parts: tl.tensor,
    best: tl.tensor,
    logits: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    tiles: tl.tensor,
    padded: tl.constexpr,
) -> None:
    """Choose among the tiles, of which there are at most `padded`."""
    sample, tile = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    there, part = tile < tiles, parts + sample * 3 * tiles + tile
    values = tl.load(part, mask=there, other=float("-inf"))
    largest = tl.load(part + tiles, mask=there, other=float("-inf"))
    totals = tl.load(part + 2 * tiles, mask=there, other=0.0)
    found = tl.load(best + sample * tiles + tile, mask=there, other=0)
    token = tl.min(tl.where(there & (values == tl.max(values, axis=0)), found, vocabulary - 1), axis=0)
    most = tl.max(largest, axis=0)
    total = tl.sum(totals * tl.exp(largest - most), axis=0)
    logit = tl.load(logits + sample * stride + token).to(tl.float32)
    tl.store(tokens + sample, token.to(tl.int64))
    tl.store(logprobs + sample, logit - most - tl.log(total))
