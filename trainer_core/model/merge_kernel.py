"""The sum of a weight and its adapter on a card, with the bits that `adapters.merged` has elsewhere. Imports Triton."""

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 16, 256  # block of a program


def merged(weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor, scale: float) -> torch.Tensor:
    """As `adapters.merged`."""
    found, (rows, columns) = torch.empty_like(weight, memory_format=torch.contiguous_format), weight.shape
    grid = triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS)
    weight, b, a = weight.contiguous(), b.contiguous(), a.contiguous()
    with torch.cuda.device_of(weight):
        # a product that is not rounded before it is added would be another number
        _merge[grid](weight, b, a, found, scale, rows, columns, len(a), _ROWS, _COLUMNS, enable_fp_fusion=False)  # pyright: ignore
    return found


@triton.jit
def _merge(
    weight: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    found: tl.tensor,
    scale: tl.float32,  # pyright: ignore[reportInvalidTypeForm]
    rows: int,
    columns: int,
    rank: int,
    own_rows: tl.constexpr,
    own_columns: tl.constexpr,
) -> None:
    row = tl.program_id(0) * own_rows + tl.arange(0, own_rows)
    column = tl.program_id(1) * own_columns + tl.arange(0, own_columns)
    total = tl.zeros((own_rows, own_columns), tl.float32)
    for place in range(rank):
        left = tl.load(b + row * rank + place, row < rows, 0.0).to(tl.float32) * scale
        right = tl.load(a + place * columns + column, column < columns, 0.0).to(tl.float32)
        total += left[:, None] * right[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    places = row.to(tl.int64)[:, None] * columns + column[None, :]
    before = tl.load(weight + places, inside, 0.0).to(tl.float32)
    tl.store(found + places, (total + before).to(found.dtype.element_ty), inside)
