"""The division of a sequence between context-parallel ranks. Imports no torch.

Its positions are filled up to a multiple of twice the number n of ranks, and cut into as many pieces, of which rank r
holds the pieces r and 2 n - 1 - r: so each rank attends to equally much. Megatron and Transformer Engine divide a
sequence in the same way (`thd_get_partitioned_indices`)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Context:
    """The share of each sequence that a rank holds."""

    ranks: int = 1  # ranks that divide each sequence
    rank: int = 0  # the number of this one

    def held(self, lengths: Indices) -> Indices:
        """Positions of sequences of these lengths that each rank holds, with those that fill up."""
        return lengths if self.ranks == 1 else -(-lengths // (2 * self.ranks)) * 2

    def positions(self, places: Indices, held: Indices) -> Indices:
        """Positions in their sequences, from places among the `held` ones that this rank holds of each."""
        if self.ranks == 1:
            return places
        piece = held // 2
        return places + np.where(places < piece, self.rank, 2 * self.ranks - 2 - self.rank) * piece

    def holders(self, positions: Indices, held: Indices) -> tuple[Indices, Indices]:
        """The rank that holds a position, and its place among the `held` ones that each rank holds of the sequence."""
        piece = np.maximum(held // 2, 1)
        number = positions // piece
        second = number >= self.ranks
        return np.where(second, 2 * self.ranks - 1 - number, number), positions % piece + second * piece


WHOLE = Context()  # sequences are not divided
