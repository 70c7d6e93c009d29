"""The experts by which an engine sampled, for the positions of flat batches. Imports numpy only."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.errors import InputError
from trainer_core.batches.flat import FlatBatch
from trainer_core.batches.sequences import Sequences

OWN = -1
"""A position for which the trainer's router chooses itself."""


@dataclass(frozen=True)
class Routing:
    """The choices of a model's routers."""

    experts: int  # of a layer
    layers: int  # that have experts
    chosen: int  # experts of a token

    @property
    def itemsize(self) -> int:
        return 1 if self.experts <= 256 else 2

    @property
    def token_bytes(self) -> int:
        return self.layers * self.chosen * self.itemsize

    def check(self, routes: NDArray[np.uint8] | None) -> None:
        """Refuse (P, bytes) routes that are not those of such a model. Raises InputError with both sizes."""
        repair = "sample with this model and train.experts.replay = true, or set it to false"
        if routes is None:
            raise InputError(f"train.experts.replay = true, but the samples have no routes: {repair}")
        if routes.shape[1] != (wanted := self.token_bytes):
            raise InputError(
                f"train.experts.replay = true, but a token's routes have {routes.shape[1]} bytes, and those of the "
                f"model {wanted}: {self.layers} layers with {self.chosen} of {self.experts} experts; {repair}"
            )
        largest = int(self._numbers(routes).max(initial=0))
        if largest >= self.experts:
            fact = f"the samples' routes name expert {largest}, and the model has {self.experts}"
            raise InputError(f"train.experts.replay = true, but {fact}: {repair}")

    def of_batch(self, sequences: Sequences, batch: FlatBatch) -> NDArray[np.int16]:
        """(T, layers * chosen) experts of each position, `OWN` for padding."""
        assert sequences.routes is not None, "the samples have been checked"
        first = np.cumsum(sequences.positions) - sequences.positions
        places = np.repeat(first[batch.rows], batch.lengths) + batch.positions
        found = self._numbers(sequences.routes[np.where(batch.filling, 0, places)]).astype(np.int16)
        found[batch.filling] = OWN
        return found

    def _numbers(self, routes: NDArray[np.uint8]) -> NDArray[np.generic]:
        return np.ascontiguousarray(routes).view(f"<u{self.itemsize}")
