"""A digest of tensors that costs about one read of the memory and is the same on every device."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainer_core.weights.digest_kernel import Work

_WORD = 8  # bytes
_CHUNK = 1 << 15  # words; what is computed with stays in the processor's cache
_K1 = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed word: spreads the positions
_K2 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 of splitmix64 as a signed word: carries each bit into the higher ones


def dtype_name(dtype: torch.dtype) -> str:
    """Name of an element type without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of type, shape and bytes, 32 hexadecimal characters.

    The bytes are read as little-endian 64-bit words w[i]; each is mixed with its position and the results are added
    modulo 2**64, so swapped, moved or zeroed words change it. Signed wrap-around arithmetic is the same on CPU and GPU.
    The digest detects accidents, not adversaries.
    """
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """`tensor_digest` of each tensor, wherever it is."""
    found: dict[int, str] = {}
    by_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(place)
    for places in by_device.values():
        found |= zip(places, prepare_digests([tensors[place] for place in places]).begin().read(), strict=True)
    return [found[place] for place in range(len(tensors))]


def prepare_digests(tensors: Sequence[torch.Tensor]) -> "PreparedDigests":
    """Prepare `tensor_digest` of tensors that are all on one device."""
    return PreparedDigests(tensors)


class PreparedDigests:
    """Digests of what tensors, all on one device, will hold when they are begun. On a card only the launch of a kernel
    is left to do then.

    Tensors need not be contiguous: on a card rows of whole words that are equally far apart, as the column slices of a
    matrix are, are read where they lie; anything else is copied first.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._heads = [head(tensor.shape, tensor.dtype) for tensor in self._tensors]
        self._work = _work(self._tensors) if self._tensors and self._tensors[0].is_cuda else None

    def begin(self) -> "BegunDigests":
        """Compute them; a card is not waited for."""
        if self._work is not None:
            return BegunDigests(self._heads, bring(self._work.launch()).read)
        found = [_sum_on_cpu(tensor) for tensor in self._tensors]
        return BegunDigests(self._heads, lambda: found)


def head(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Text of type and shape in a digest."""
    return f"{dtype_name(dtype)} {tuple(shape)}"


@dataclass(frozen=True)
class Brought:
    """Sums on their way from a card, which may go on with other work behind them."""

    here: torch.Tensor
    """(T,) int64, on the host."""
    arrived: torch.cuda.Event
    """Event of their arrival."""

    def read(self) -> list[int]:
        """The sums, as soon as they have arrived."""
        self.arrived.synchronize()
        return self.here.tolist()

    def part(self, first: int, end: int) -> "Brought":
        """Some of them."""
        return Brought(self.here[first:end], self.arrived)


def bring(sums: torch.Tensor) -> Brought:
    """Begin to bring sums from a card, behind what its current stream does now."""
    here = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(sums.device))
    return Brought(here, arrived)


@dataclass(frozen=True)
class BegunDigests:
    """Digests of tensors, which a card may still be computing. The tensors may already be freed, or written by later
    work of the same stream.
    """

    heads: list[str]
    """Type and shape of each tensor."""
    sums: Callable[[], list[int]]
    """Sum of the mixed words of each, as soon as it is known."""

    def read(self) -> list[str]:
        """`tensor_digest` of each tensor; waits for the card as long as it is at these."""
        return [_hashed(one, total) for one, total in zip(self.heads, self.sums(), strict=True)]


@lru_cache(maxsize=1 << 15)  # what has landed is mostly what has arrived
def _hashed(head: str, total: int) -> str:
    return hashlib.blake2b(f"{head} {total % 2**64:016x}".encode(), digest_size=16).hexdigest()


def _work(tensors: list[torch.Tensor]) -> "Work":
    from trainer_core.weights.digest_kernel import Work  # imports Triton

    return Work(tensors)


def _sum_on_cpu(tensor: torch.Tensor) -> int:
    words = _words(tensor)
    count = min(_CHUNK, words.numel())
    mixed, shifted = words.new_empty(count), words.new_empty(count)
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        x, y = mixed[: part.numel()], shifted[: part.numel()]
        torch.add(_spread(_CHUNK)[: part.numel()], _signed(start * _K1), out=x)  # (positions + 1) * K1
        torch.bitwise_xor(x, part, out=x)
        x.bitwise_xor_(torch.bitwise_right_shift(x, 32, out=y)).mul_(_K2)
        x.bitwise_xor_(torch.bitwise_right_shift(x, 29, out=y))
        total += int(x.sum())
    return total


@lru_cache(maxsize=1)
def _spread(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64).mul_(_K1)


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


def _words(tensor: torch.Tensor) -> torch.Tensor:
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)  # (bytes,)
    missing = -octets.numel() % _WORD
    if missing:
        octets = torch.nn.functional.pad(octets, (0, missing))
    elif octets.storage_offset() % _WORD:
        octets = octets.clone()  # a view as words must start at a whole word
    return octets.view(torch.int64)  # (bytes / 8,)


def mix(words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Each word mixed with its position, (n,) int64 all three; their sum changes with every word that changes or moves.

    The words need not be in order, so that the sums of the shards of a tensor add up to that of the tensor.
    """
    mixed = words ^ ((positions + 1) * _K1)
    mixed = (mixed ^ (mixed >> 32)) * _K2
    return mixed ^ (mixed >> 29)
