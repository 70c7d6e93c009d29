"""Digests of the tensors of an update, planned before it: while engines stand still, as little as possible is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch

from trainer_core.weights.digest import BegunDigests, Brought, bring, head, prepare_digests
from trainer_core.weights.packing import outlines, views
from trainer_core.weights.plan import PlannedTensor

if TYPE_CHECKING:
    from trainer_core.weights.digest_kernel import Rows


_WORD = 8  # bytes


class Outline(Protocol):
    """A tensor in a buffer that comes later, (bytes,) uint8."""

    def head(self) -> str:
        """Text of type and shape in its digest."""
        ...

    def rows(self) -> "Rows | None":
        """The rows that a card's kernel reads, from the buffer's first byte; None if it must be copied or converted."""
        ...

    def at(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in its buffer, converted."""
        ...


@dataclass(frozen=True)
class Whole:
    """All of a planned tensor, in the buffer of its bucket."""

    planned: PlannedTensor

    def head(self) -> str:
        return f"{self.planned.dtype} {self.planned.shape}"

    def rows(self) -> "Rows | None":
        return self.planned.offset, self.planned.nbytes, 0, int(self.planned.offset % _WORD == 0)

    def at(self, buffer: torch.Tensor) -> torch.Tensor:
        ((_, found),) = views([self.planned], buffer)
        return found


@dataclass(frozen=True)
class Cut:
    """Part of a tensor, or one that is converted."""

    of: torch.Tensor
    """A view of such a buffer on the device `meta`."""
    kind: torch.dtype
    """Type to which it is converted first."""

    def head(self) -> str:
        return head(self.of.shape, self.kind)

    def rows(self) -> "Rows | None":
        from trainer_core.weights.digest_kernel import rows_in_buffer  # imports Triton

        return rows_in_buffer(self.of) if self.of.dtype == self.kind else None

    def at(self, buffer: torch.Tensor) -> torch.Tensor:
        size = self.of.element_size()
        elements = buffer[: buffer.numel() // size * size].view(self.of.dtype)
        first = elements.storage_offset() + self.of.storage_offset()
        return elements.as_strided(self.of.shape, self.of.stride(), first).to(self.kind)


def thought_of(planned: PlannedTensor) -> torch.Tensor:
    """A planned tensor as a view of the buffer of its bucket, on the device `meta`."""
    ((_, found),) = outlines([planned])
    return found


def plan_digests(buckets: Mapping[int, Sequence[Outline]], device: torch.device) -> "PlannedDigests":
    """Plan the digests of buckets of tensors: see `PlannedDigests`."""
    return PlannedDigests(buckets, device)


class PlannedDigests:
    """Digests of the tensors of buckets, each in a buffer that is given only when they are begun. If that is on a card,
    only the launch of a kernel is left to do then, unless a tensor of the bucket must be copied or converted first.
    """

    def __init__(self, buckets: Mapping[int, Sequence[Outline]], device: torch.device) -> None:
        """Args:
        buckets: by number.
        device: where the buffers will be, as far as is known.
        """
        self._buckets = buckets
        self._heads = {number: [one.head() for one in own] for number, own in buckets.items()}
        self._direct = _Direct(buckets, device) if device.type == "cuda" else None
        self._others: dict[int, BegunDigests] = {}

    def begin(self, number: int, buffer: torch.Tensor) -> None:
        """Compute those of a bucket in its buffer, (bytes,) uint8, which begins at a whole word of 8 bytes; a card is
        not waited for.
        """
        if self._direct is None or not self._direct.begin(number, buffer):
            self._others[number] = prepare_digests([one.at(buffer) for one in self._buckets[number]]).begin()

    def begun(self) -> dict[int, BegunDigests]:
        """Digests that were begun since the last call, by number; from now on they may be begun again."""
        direct = {} if self._direct is None else self._direct.brought()
        others, self._others = self._others, {}
        return others | {number: BegunDigests(self._heads[number], sums.read) for number, sums in direct.items()}


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

    def brought(self) -> dict[int, Brought]:
        """The sums of what was begun; all on their way to the host at once."""
        if self._sums is None:
            return {}
        brought, begun = bring(self._sums), self._begun
        self._sums, self._begun = None, []
        parts = (brought.part(first, end) for first, end in pairwise(self._table.ends))
        return {number: part for number, part in zip(self._numbers, parts, strict=True) if number in begun}
