"""The digest's sums of many tensors on a card at once. Imports Triton."""

# Triton's language has no types that a checker knows

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

_WORD = 8  # bytes
_BLOCK = 2048  # words that a program reads at a time
_NARROW = 256  # words that it reads at a time byte by byte
_SPAN = 32 * _BLOCK  # words of a program, 512 KiB

_K1 = tl.constexpr(-0x61C8864680B583EB)  # as in `digest`
_K2 = tl.constexpr(-0x40A7B892E31B1A47)


@dataclass(frozen=True)
class _Rows:
    """Memory of a tensor: rows of whole words, equally far apart, or one row of any length."""

    address: int
    nbytes: int
    """Of all rows."""
    row: int
    """Words of a row; 0 if there is only one."""
    stride: int
    """Bytes from row to row; without rows whether `address` lies at a whole word."""


def sums_of_words(tensors: list[torch.Tensor]) -> list[int]:
    """For each tensor the sum of its mixed words, as a signed word; all tensors on one device."""
    rows = [_rows(tensor) for tensor in tensors]
    kept = [tensor for tensor, _ in rows]  # copies of what had to be copied, until the kernel has read them
    table = np.array([[r.address, r.nbytes, r.row, r.stride] for _, r in rows], dtype=np.int64)  # (T, 4)
    spans = -(-table[:, 1] // (_SPAN * _WORD))  # (T,) programs of each tensor
    owner = np.repeat(np.arange(len(tensors)), spans)  # (P,)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(spans) - spans, spans)  # (P,) which span of its tensor
    work = np.concatenate((table.reshape(-1), np.stack((owner, place), axis=1).reshape(-1)))
    given = torch.from_numpy(work).to(kept[0].device)
    sums = given.new_zeros(len(tensors))
    if len(owner):
        with torch.cuda.device_of(sums):
            _add_words[(len(owner),)](given, given[table.size :], sums, _SPAN, _BLOCK, _NARROW)  # pyright: ignore[reportArgumentType]
    return sums.tolist()


def _rows(tensor: torch.Tensor) -> tuple[torch.Tensor, _Rows]:
    if tensor.is_contiguous():
        return tensor, _Rows(tensor.data_ptr(), tensor.nbytes, 0, int(tensor.data_ptr() % _WORD == 0))
    length, stride = _equal_rows(tensor)
    row, stride = length * tensor.element_size(), stride * tensor.element_size()
    if row and not (tensor.data_ptr() % _WORD or row % _WORD or stride % _WORD):
        return tensor, _Rows(tensor.data_ptr(), tensor.nbytes, row // _WORD, stride)
    return _rows(tensor.contiguous())


def _equal_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Elements of the tensor's longest contiguous rows, and from one to the next; (0, 0) if they are not equally far
    apart.
    """
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
    table: tl.tensor,
    work: tl.tensor,
    sums: tl.tensor,
    span: tl.constexpr,
    block: tl.constexpr,
    narrow: tl.constexpr,
) -> None:
    """Add the mixed words of one span of a tensor to the tensor's sum."""
    tensor = tl.load(work + 2 * tl.program_id(0))
    begin = tl.load(work + 2 * tl.program_id(0) + 1) * span
    address = tl.load(table + 4 * tensor)
    nbytes = tl.load(table + 4 * tensor + 1)
    row = tl.load(table + 4 * tensor + 2)
    stride = tl.load(table + 4 * tensor + 3)
    end = tl.minimum(begin + span, nbytes // 8)
    found = tl.zeros((block,), dtype=tl.int64)
    if row != 0:
        for first in range(begin, end, block):
            at = first + tl.arange(0, block)
            where = (address + (at // row) * stride + (at % row) * 8).to(tl.pointer_type(tl.int64))
            found += _mixed(tl.load(where, mask=at < end, other=0), at, end)
    elif stride != 0:
        words = address.to(tl.pointer_type(tl.int64))
        for first in range(begin, end, block):
            at = first + tl.arange(0, block)
            found += _mixed(tl.load(words + at, mask=at < end, other=0), at, end)
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
            parts += _mixed(word, at, last)
        tl.atomic_add(sums + tensor, tl.sum(parts, axis=0))
    tl.atomic_add(sums + tensor, tl.sum(found, axis=0))


@triton.jit
def _mixed(words: tl.tensor, positions: tl.tensor, end: tl.tensor) -> tl.tensor:
    x = words ^ ((positions.to(tl.int64) + 1) * _K1)
    x = (x ^ (x >> 32)) * _K2
    x = x ^ (x >> 29)
    return tl.where(positions < end, x, 0)
