"""Boxes in whole tensors, and the elements of them that a rank owns. Needs no Megatron."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from trainer_core.state.saved import Region

_Bounds = tuple[tuple[int, ...], tuple[int, ...]]  # start and shape


@dataclass(frozen=True)
class Box:
    """A box in a whole tensor."""

    name: str
    """Name of the whole tensor."""
    size: tuple[int, ...]
    """Shape of the whole tensor, padding of the vocabulary included."""
    content: tuple[int, ...]
    """Shape of the whole tensor without that padding."""
    region: Region
    """Place of the box."""

    @property
    def elements(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.region.shape)

    def positions(self, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Row-major positions in the whole tensor of the elements first, ... of the box, (count,) int64."""
        strides = _strides(self.size)
        axes = _merged(self.region.shape, strides)
        rest = torch.arange(first, first + count, dtype=torch.int64, device=device)
        found = torch.full_like(rest, sum(map(math.prod, zip(self.region.start, strides, strict=True))))
        for length, stride in reversed(axes[1:]):
            found += (rest % length) * stride
            rest = rest // length
        return found + rest * (axes[0][1] if axes else 1)


@dataclass(frozen=True)
class Shard:
    """Elements of a whole tensor that this rank alone owns."""

    box: Box
    """Box that contains them."""
    first: int
    """Number of the first element in the row-major order of the box; the others follow it."""
    values: torch.Tensor
    """The live elements, one-dimensional."""

    @property
    def padded(self) -> bool:
        """True if some of the elements may be padding of the vocabulary."""
        return self.box.size != self.box.content

    def regions(self) -> Iterator[tuple[Region, torch.Tensor]]:
        """The boxes of the whole tensor that the elements make up, with their values in the shape of each.

        Without the padding of the vocabulary, which is no part of a state: it depends on the layout.
        """
        content = Region((0,) * len(self.box.content), self.box.content)
        for region, values in self._cut():
            inside = region.overlap(content)
            if inside is not None:
                yield inside, values[inside.within(region)]

    def _cut(self) -> Iterator[tuple[Region, torch.Tensor]]:
        taken = 0
        for start, shape in _cut(self.box.region.shape, self.first, self.first + self.values.numel()):
            begin = tuple(map(sum, zip(self.box.region.start, start, strict=True)))
            count = math.prod(shape)
            yield Region(begin, shape), self.values[taken : taken + count].view(shape)
            taken += count


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Length and stride of as few axes as describe the same elements in the same order."""
    axes: list[tuple[int, int]] = []
    for length, stride in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == length * stride:
            axes[-1] = axes[-1][0] * length, stride
        else:
            axes.append((length, stride))
    return axes


def _cut(shape: tuple[int, ...], begin: int, end: int) -> Iterator[_Bounds]:
    """Start and shape of boxes that make up the elements from `begin` to `end` of a box, in row-major order."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row, inner = math.prod(shape[1:]), shape[1:]
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        yield from _within(last, _cut(inner, begin - last * row, end - last * row))
        return
    yield from _within(first - 1, _cut(inner, begin - (first - 1) * row, row) if begin < first * row else ())
    if first < last:
        yield (first, *(0,) * len(inner)), (last - first, *inner)
    yield from _within(last, _cut(inner, 0, end - last * row))


def _within(row: int, boxes: Iterable[_Bounds]) -> Iterator[_Bounds]:
    for start, shape in boxes:
        yield (row, *start), (1, *shape)
