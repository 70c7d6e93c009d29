"""The digest's sums of many tensors on a card at once. Imports Triton."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import cast

import numpy as np
import torch
import triton
import triton.language as tl

from trainer_core.weights.packing import WORD

_BLOCK = 2048  # words that a program reads at a time
_NARROW = 256  # words that it reads at a time byte by byte
_SPAN = 32 * _BLOCK  # words of a program, 512 KiB

Rows = tuple[int, int, int, int]  # a tensor's memory as the kernel reads it, described at `_rows`

_K1 = tl.constexpr(-0x61C8864680B583EB)  # as in `digest`
_K2 = tl.constexpr(-0x40A7B892E31B1A47)


class Work:
    """For each tensor the sum of its mixed words; all tensors on one device."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors  # whose memory must stay until the launch
        rows = [_rows(tensor, tensor.data_ptr()) for tensor in tensors]
        others = [tensor for tensor, found in zip(tensors, rows, strict=True) if found is None]
        self._copies = [(other, torch.empty_like(other, memory_format=torch.contiguous_format)) for other in others]
        copied = (cast(Rows, _rows(copy, copy.data_ptr())) for _, copy in self._copies)
        self._table = Table([[found or next(copied) for found in rows]], tensors[0].device)

    def launch(self) -> torch.Tensor:
        """Begin to compute the sums on the current stream, (T,) int64, signed words, on the device."""
        for tensor, copy in self._copies:
            copy.copy_(tensor)
        sums = self._table.sums()
        self._table.add(sums, 0, base=0)
        return sums


class Table:
    """Places of the words of tensors, in groups; made in advance, so that only a launch is left for each."""

    def __init__(self, groups: Sequence[Sequence[Rows]], device: torch.device) -> None:
        """`groups` are the rows of each tensor in each group."""
        rows = np.array([row for group in groups for row in group], dtype=np.int64).reshape(-1, 4)  # (T, 4)
        spans = -(-rows[:, 1] // (_SPAN * WORD))  # (T,) programs of each tensor
        owner = np.repeat(np.arange(len(rows)), spans)  # (P,)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(spans) - spans, spans)  # (P,) which span of its tensor
        work = np.concatenate((rows.reshape(-1), np.stack((owner, place), axis=1).reshape(-1)))
        table = torch.from_numpy(work)  # (4 T + 2 P,) int64; not pinned, it would wait for all earlier launches
        self._rows = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
        self.ends: list[int] = np.cumsum([0, *(len(group) for group in groups)]).tolist()
        """Place among all of the first tensor of each group, and the number of tensors."""
        programs = np.concatenate(([0], np.cumsum(spans)))[self.ends].tolist()  # (groups + 1,) where each group's begin
        self._programs = [end - first for first, end in pairwise(programs)]
        self._work = self._rows[rows.size :].split_with_sizes([2 * count for count in self._programs])
        if device.type == "cuda":
            _compiled(device)

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def sums(self) -> torch.Tensor:
        """Zeros to which `add` adds, one for each tensor, (T,) int64."""
        return self._rows.new_zeros(self.ends[-1])

    def add(self, sums: torch.Tensor, group: int, base: int) -> None:
        """Begin to add the mixed words of a group's tensors on the current stream; `base` is added to every address."""
        if self._programs[group]:
            with torch.cuda.device_of(sums):
                grid = (self._programs[group],)
                _add_words[grid](base, self._rows, self._work[group], sums, _SPAN, _BLOCK, _NARROW)  # pyright: ignore[reportArgumentType]


def rows_in_buffer(outline: torch.Tensor) -> Rows | None:
    """Rows of a tensor that is given as a view of a buffer on the device `meta`, from the buffer's first byte, which is
    at a whole word; None if it cannot be read where it will lie."""
    return _rows(outline, int(outline.storage_offset()) * outline.element_size())


@lru_cache
def _compiled(device: torch.device) -> None:
    """Let the kernel be compiled and loaded now: this takes a second or two, in which engines would stand still."""
    table = torch.zeros(6, dtype=torch.int64, device=device)  # a tensor without bytes
    with torch.cuda.device_of(table):
        _add_words[(1,)](0, table, table[4:], table.new_zeros(1), _SPAN, _BLOCK, _NARROW)  # pyright: ignore[reportArgumentType]


def _rows(tensor: torch.Tensor, address: int) -> Rows | None:
    """A tensor's memory from `address` on as the kernel reads it: rows of whole words, equally far apart, or one row of
    any length. Returns address; bytes; words of a row, 0 if there is only one; bytes from row to row, or if there is
    only one whether it begins at a whole word. None if it is neither, and must be copied."""
    if tensor.is_contiguous():
        return address, tensor.nbytes, 0, int(address % WORD == 0)
    length, stride = _equal_rows(tensor)
    row, stride = length * tensor.element_size(), stride * tensor.element_size()
    if row and not (address % WORD or row % WORD or stride % WORD):
        return address, tensor.nbytes, row // WORD, stride
    return None


def _equal_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Elements of the longest contiguous rows, and from one to the next; (0, 0) if they are not equally far apart."""
    axes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    length = 1
    while axes and axes[-1][1] == length:
        length *= axes.pop()[0]
    apart = axes[-1][1] if axes else length
    expected = apart
    for size, stride in reversed(axes):
        if stride != expected:
            return 0, 0
        expected *= size
    return length, apart


@triton.jit
def _add_words(
    base: tl.int64,  # pyright: ignore[reportInvalidTypeForm] - or small numbers would have a kernel of their own
    table: tl.tensor,
    work: tl.tensor,
    sums: tl.tensor,
    span: tl.constexpr,
    block: tl.constexpr,
    narrow: tl.constexpr,
) -> None:
    tensor = tl.load(work + 2 * tl.program_id(0))
    begin = tl.load(work + 2 * tl.program_id(0) + 1) * span
    address = base + tl.load(table + 4 * tensor)
    nbytes = tl.load(table + 4 * tensor + 1)
    row = tl.load(table + 4 * tensor + 2)
    stride = tl.load(table + 4 * tensor + 3)
    end = tl.minimum(begin + span, nbytes // 8)
    lanes = tl.arange(0, block)
    spread = (begin + lanes + 1) * _K1
    step = tl.full((1,), block, dtype=tl.int64) * _K1
    found = tl.zeros((block,), dtype=tl.int64)
    if row != 0:
        for first in range(begin, end, block):
            at = first + lanes
            where = (address + (at // row) * stride + (at % row) * 8).to(tl.pointer_type(tl.int64))
            inside = at < end
            found += tl.where(inside, _mixed(tl.load(where, mask=inside, other=0), spread), 0)
            spread += step
    elif stride != 0:
        words = address.to(tl.pointer_type(tl.int64))
        whole = begin + (end - begin) // block * block
        for first in range(begin, whole, block):
            found += _mixed(tl.load(words + first + lanes), spread)
            spread += step
        inside = whole + lanes < end
        found += tl.where(inside, _mixed(tl.load(words + whole + lanes, mask=inside, other=0), spread), 0)
    if row == 0:
        # byte by byte: all words of a tensor that does not lie at a whole word, or the part of one at its end
        octets = address.to(tl.pointer_type(tl.uint8))
        last = tl.minimum(begin + span, (nbytes + 7) // 8)
        rest = tl.where(stride == 0, begin, end)
        parts = tl.zeros((narrow,), dtype=tl.int64)
        for first in range(rest, last, narrow):
            at = first + tl.arange(0, narrow)
            word = tl.zeros((narrow,), dtype=tl.int64)
            for octet in tl.static_range(8):
                inside = (at < last) & (at * 8 + octet < nbytes)
                word |= tl.load(octets + at * 8 + octet, mask=inside, other=0).to(tl.int64) << (8 * octet)
            parts += tl.where(at < last, _mixed(word, (at.to(tl.int64) + 1) * _K1), 0)
        tl.atomic_add(sums + tensor, tl.sum(parts, axis=0))
    tl.atomic_add(sums + tensor, tl.sum(found, axis=0))


@triton.jit
def _mixed(words: tl.tensor, spread: tl.tensor) -> tl.tensor:
    """Words mixed with their positions, of which `spread` is (position + 1) times the first factor."""
    x = words ^ spread
    x = (x ^ (x >> 32)) * _K2
    return x ^ (x >> 29)
