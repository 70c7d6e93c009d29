"""Division of sequences over data-parallel ranks and micro-batches."""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class BatchLimits:
    tokens: int  # most positions; a longer sequence goes alone
    sequences: int | None = None  # most sequences; None: as many as fit


def share(
    lengths: Indices, rows: Indices, replicas: int, limits: BatchLimits, multiple: int = 1
) -> list[list[Indices]]:
    """Divide `rows` over data-parallel replicas and then into micro-batches: result[replica][micro-batch] -> rows.
    Longest first, each sequence goes to the emptiest micro-batch (LPT, Graham 1969), of which there are as few as fit.
    All replicas get the same number, a multiple of `multiple`, as the schedules require, and those that run at the same
    time are of similar size. Missing micro-batches are empty arrays; rows without positions are left out. `lengths` are
    the (N,) positions of all sequences. The result depends on nothing but the arguments."""
    rows = rows[lengths[rows] > 0]
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    rounds = _up(max(1, -(-_fewest(lengths[order], limits) // replicas)), multiple)
    while (filled := _fill(lengths, order, rounds * replicas, limits)) is None:
        rounds = _up(rounds + max(1, rounds // 16), multiple)
    filled.sort(key=lambda members: -int(lengths[members].sum()))
    return [filled[replica::replicas] for replica in range(replicas)]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _fewest(lengths: Indices, limits: BatchLimits) -> int:
    """Lower bound of the number of micro-batches."""
    by_tokens = -(-int(np.minimum(lengths, limits.tokens).sum()) // limits.tokens)
    by_sequences = -(-len(lengths) // (limits.sequences or max(1, len(lengths))))
    large = int(np.count_nonzero(2 * lengths > limits.tokens))  # no two of them fit together
    return max(by_tokens, by_sequences, large)


def _fill(lengths: Indices, order: Indices, count: int, limits: BatchLimits) -> list[Indices] | None:
    """`count` micro-batches that hold `order`, or None if it does not fit."""
    members: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, number) for number in range(count)]  # a heap of (positions, micro-batch) with room
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if not emptiest:
            return None
        load, number = emptiest[0]
        if load and load + length > limits.tokens:
            return None
        members[number].append(row)
        if len(members[number]) == limits.sequences:
            heapq.heappop(emptiest)
        else:
            heapq.heapreplace(emptiest, (load + length, number))
    return [np.sort(np.array(batch, dtype=np.int64)) for batch in members]
