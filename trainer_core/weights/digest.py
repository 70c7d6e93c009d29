"""A digest of tensors that costs about one read of the memory and is the same on every device.

Digests of an update are planned before it: while engines stand still, as little as possible is left."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from trainer_core.weights.packing import WORD, dtype_name, views
from trainer_core.weights.plan import PlannedTensor

if TYPE_CHECKING:
    from trainer_core.weights.digest_kernel import Rows

_CHUNK = 1 << 15  # words; what is computed with stays in the processor's cache
_K1 = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed word: spreads the positions
_K2 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 of splitmix64 as a signed word: carries each bit into the higher ones


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of type, shape and bytes, 32 hexadecimal characters. The bytes are read as little-endian 64-bit words
    w[i]; each is mixed with its position and the results are added modulo 2**64, so swapped, moved or zeroed words
    change it. Signed wrap-around arithmetic is the same on CPU and GPU. The digest detects accidents, not adversaries.
    """
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    found: dict[int, str] = {}
    by_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(place)
    for places in by_device.values():
        found |= zip(places, PreparedDigests([tensors[place] for place in places]).begin().read(), strict=True)
    return [found[place] for place in range(len(tensors))]


class PreparedDigests:
    """Digests of what tensors, all on one device, will hold when they are begun. On a card only the launch of a kernel
    is left to do then. Tensors need not be contiguous: on a card rows of whole words that are equally far apart, as the
    column slices of a matrix are, are read where they lie; anything else is copied first."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._heads = [_head(tensor.shape, tensor.dtype) for tensor in self._tensors]
        self._work = None
        if self._tensors and self._tensors[0].is_cuda:
            from trainer_core.weights.digest_kernel import Work  # imports Triton

            self._work = Work(self._tensors)

    def begin(self) -> "BegunDigests":
        """Compute them; a card is not waited for."""
        if self._work is not None:
            return BegunDigests(self._heads, _bring(self._work.launch()))
        found = [_sum_on_cpu(tensor) for tensor in self._tensors]
        return BegunDigests(self._heads, lambda: found)


def _head(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)}"


def _bring(sums: torch.Tensor) -> Callable[..., list[int]]:
    """Begin to bring sums, (T,) int64, from a card, behind what its current stream does now. The result gives those
    from one place to another, by default all, as soon as they have arrived."""
    here = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(sums.device))

    def read(first: int = 0, end: int | None = None) -> list[int]:
        arrived.synchronize()
        return here[first:end].tolist()

    return read


@dataclass(frozen=True)
class BegunDigests:
    """Digests that a card may still be computing; their tensors may already be freed, or written by its later work."""

    heads: list[str]  # type and shape of each tensor
    sums: Callable[[], list[int]]  # sum of the mixed words of each, as soon as it is known

    def read(self) -> list[str]:
        """`tensor_digest` of each tensor; waits for the card as long as it is at these."""
        return [_hashed(one, total) for one, total in zip(self.heads, self.sums(), strict=True)]


@lru_cache(maxsize=1 << 15)  # what has landed is mostly what has arrived
def _hashed(head: str, total: int) -> str:
    return hashlib.blake2b(f"{head} {total % 2**64:016x}".encode(), digest_size=16).hexdigest()


def _sum_on_cpu(tensor: torch.Tensor) -> int:
    words = _words(tensor)
    count = min(_CHUNK, words.numel())
    mixed, shifted = words.new_empty(count), words.new_empty(count)
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        x, y = mixed[: part.numel()], shifted[: part.numel()]
        first = (start * _K1 + 2**63) % 2**64 - 2**63  # as a signed word
        torch.add(_spread(_CHUNK)[: part.numel()], first, out=x)  # (positions + 1) * K1
        torch.bitwise_xor(x, part, out=x)
        x.bitwise_xor_(torch.bitwise_right_shift(x, 32, out=y)).mul_(_K2)
        x.bitwise_xor_(torch.bitwise_right_shift(x, 29, out=y))
        total += int(x.sum())
    return total


@lru_cache(maxsize=1)
def _spread(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64).mul_(_K1)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)  # (bytes,)
    if missing := -octets.numel() % WORD:
        octets = torch.nn.functional.pad(octets, (0, missing))
    elif octets.storage_offset() % WORD:
        octets = octets.clone()  # a view as words must start at a whole word
    return octets.view(torch.int64)  # (bytes / 8,)


def mix(words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Each word mixed with its position, (n,) int64 all three; their sum changes with every word that changes or moves.
    The words need not be in order, so that the sums of the shards of a tensor add up to that of the tensor."""
    mixed = words ^ ((positions + 1) * _K1)
    mixed = (mixed ^ (mixed >> 32)) * _K2
    return mixed ^ (mixed >> 29)


@dataclass(frozen=True)
class Whole:
    """All of a planned tensor, in the buffer of its bucket, (bytes,) uint8, which comes later."""

    planned: PlannedTensor

    def head(self) -> str:
        return f"{self.planned.dtype} {self.planned.shape}"

    def rows(self) -> "Rows | None":
        """The rows that a card's kernel reads, from the buffer's first byte; None if it must be copied or converted."""
        return self.planned.offset, self.planned.nbytes, 0, int(self.planned.offset % WORD == 0)

    def at(self, buffer: torch.Tensor) -> torch.Tensor:
        ((_, found),) = views([self.planned], buffer)
        return found


@dataclass(frozen=True)
class Cut:
    """Part of a tensor in such a buffer, or one that is converted; with the functions of `Whole`."""

    of: torch.Tensor  # a view of such a buffer on the device `meta`
    kind: torch.dtype  # type to which it is converted first

    def head(self) -> str:
        return _head(self.of.shape, self.kind)

    def rows(self) -> "Rows | None":
        from trainer_core.weights.digest_kernel import rows_in_buffer  # imports Triton

        return rows_in_buffer(self.of) if self.of.dtype == self.kind else None

    def at(self, buffer: torch.Tensor) -> torch.Tensor:
        size = self.of.element_size()
        elements = buffer[: buffer.numel() // size * size].view(self.of.dtype)
        first = elements.storage_offset() + self.of.storage_offset()
        return elements.as_strided(self.of.shape, self.of.stride(), first).to(self.kind)


Outline = Whole | Cut


def thought_of(planned: PlannedTensor) -> torch.Tensor:
    """A planned tensor as a view of the buffer of its bucket, on the device `meta`."""
    return Whole(planned).at(torch.empty(planned.offset + planned.nbytes, dtype=torch.uint8, device="meta"))


class PlannedDigests:
    """Digests of the tensors of buckets, each in a buffer that is given only when they are begun. If that is on a card,
    only the launch of a kernel is left to do then, unless a tensor of the bucket must be copied or converted first."""

    def __init__(self, buckets: Mapping[int, Sequence[Outline]], device: torch.device) -> None:
        """Buckets are by number; `device` is where the buffers will be, as far as is known."""
        self._buckets = buckets
        self._heads = {number: [one.head() for one in own] for number, own in buckets.items()}
        self._direct = _Direct(buckets, device) if device.type == "cuda" else None
        self._others: dict[int, BegunDigests] = {}

    def begin(self, number: int, buffer: torch.Tensor) -> None:
        """Compute those of a bucket in its buffer, (bytes,) uint8, at a whole word of 8 bytes, without waiting."""
        if self._direct is None or not self._direct.begin(number, buffer):
            self._others[number] = PreparedDigests([one.at(buffer) for one in self._buckets[number]]).begin()

    def begun(self) -> dict[int, BegunDigests]:
        """Digests that were begun since the last call, by number; from now on they may be begun again."""
        direct = {} if self._direct is None else self._direct.brought()
        others, self._others = self._others, {}
        return others | {number: BegunDigests(self._heads[number], sums) for number, sums in direct.items()}


class _Direct:
    """The buckets of which a card can read every tensor where it will lie."""

    def __init__(self, buckets: Mapping[int, Sequence[Outline]], device: torch.device) -> None:
        from trainer_core.weights.digest_kernel import Table  # imports Triton

        rows = {number: [one.rows() for one in own] for number, own in buckets.items()}
        found = {number: [row for row in own if row is not None] for number, own in rows.items()}
        readable = {number: own for number, own in found.items() if len(own) == len(rows[number])}
        self._table = Table(list(readable.values()), device)
        self._numbers = list(readable)
        self._sums: torch.Tensor | None = None
        self._begun: list[int] = []

    def begin(self, number: int, buffer: torch.Tensor) -> bool:
        """Begin with a bucket; False if it is not one of these, or the buffer is elsewhere."""
        if number not in self._numbers or buffer.device != self._table.device:
            return False
        if self._sums is None:
            self._sums = self._table.sums()
        self._table.add(self._sums, self._numbers.index(number), base=buffer.data_ptr())
        self._begun.append(number)
        return True

    def brought(self) -> dict[int, Callable[[], list[int]]]:
        """The sums of what was begun; all on their way to the host at once."""
        if self._sums is None:
            return {}
        read, begun = _bring(self._sums), self._begun
        self._sums, self._begun = None, []
        parts = (partial(read, first, end) for first, end in pairwise(self._table.ends))
        return {number: part for number, part in zip(self._numbers, parts, strict=True) if number in begun}
