"""One rank's part of one bucket."""

from collections.abc import Sequence
from typing import Any

import torch

from trainer_core.weights.conversion import Conversion, gathered_by
from trainer_core.weights.exchange import Shards
from trainer_core.weights.mappings import replaced
from trainer_core.weights.packing import Packing
from trainer_core.weights.plan import PlannedTensor


class Parcel:
    """A bucket's conversions on this rank. Those that make views of live weights, as most do, may be done before the
    bucket's turn: the weights are read in it.
    """

    def __init__(self, planned: Sequence[PlannedTensor], conversions: Sequence[Conversion]) -> None:
        """Args:
        planned: the bucket's tensors.
        conversions: of the weights that become them, or this rank's shards.
        """
        self.planned, self.conversions = planned, conversions
        self._packing: Packing | None = None

    def look(self) -> None:
        """Make the views of live weights before the bucket's turn; inside `torch.no_grad`.

        Raises:
            SyncMismatch: a weight is not as it was planned.
        """
        if self._packing is None:
            self._packing = Packing(self.planned)
            for one in self.conversions:
                if one.views:
                    self._packing.add(one.convert(one.live))

    def fill(self, arena: torch.Tensor, shards: Shards, positions: "Positions") -> None:
        """Convert what is left, and write everything into the bucket's arena, (bytes,) uint8. Nothing of it is kept.

        Raises:
            SyncMismatch: a weight is not as it was planned.
        """
        self.look()
        assert self._packing is not None
        with gathered_by(shards.of), replaced(torch, arange=positions.arange):
            for one in self.conversions:
                if not one.views:
                    self._packing.add(one.convert(one.live))
        self._packing.write(arena)
        self._packing = None


class Positions:
    """Row indices of mappings, which would make them for each weight: a dozen launches, longer than the rows take.
    On the host it would have to be copied to the card, which waits for all that was launched before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._make = device, torch.arange
        self._made: dict[tuple[object, ...], torch.Tensor] = {}

    def arange(self, *bounds: Any, **how: Any) -> torch.Tensor:
        """As `torch.arange`, on the device of the model; the same for the same numbers, unless it was changed."""
        asked = (*bounds, *map(type, bounds), *how.items())
        if (made := self._made.get(asked)) is None or made._version:
            made = self._made[asked] = self._make(*bounds, **{"device": self._device, **how})
        return made
