"""One trainer rank's part of an update, sent bucket by bucket, with digests and times."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from storage.errors import RatchetError
from trainer_core.model.mesh import Mesh
from trainer_core.weights.channel import Channel, fail
from trainer_core.weights.conversion import Conversion, gathered_by
from trainer_core.weights.digest import PlannedDigests
from trainer_core.weights.exchange import Shards
from trainer_core.weights.mappings import replaced
from trainer_core.weights.packing import Packing
from trainer_core.weights.plan import Bucket, PlannedTensor, WeightPlan
from trainer_core.weights.transports.ends import Sender, open_sender


class BucketSender:
    """Sends buckets until the first failure; its rank then continues the collectives, and raises it at the end."""

    def __init__(self, channel: Channel, plan: WeightPlan, mesh: Mesh, digests: PlannedDigests) -> None:
        """Args:
        digests: of the buckets that this rank sends.
        """
        self._folder = channel.folder
        self._planned = digests
        self._sender: Sender | None = None
        self._failure: RatchetError | None = None
        self._names: dict[int, list[str]] = {}  # of what each bucket brought
        self.digests: dict[str, str] = {}
        """Digests of tensors that were sent, by name; complete after `finish`."""
        self.seconds = {"convert": 0.0, "wait": 0.0, "digest": 0.0}
        if any(bucket.sender == mesh.rank for bucket in plan.buckets):
            with self.noted():
                self._sender = open_sender(channel, plan, mesh.rank, mesh.device)

    def __enter__(self) -> "BucketSender":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._sender is not None:
            if error is not None:
                self._sender.fail(f"a trainer rank failed: {error}")
            self._sender.close()

    def send(self, bucket: Bucket, planned: Sequence[PlannedTensor], fill: Callable[[torch.Tensor], object]) -> None:
        """Publish a bucket that `fill` writes into its arena; does nothing after a failure.

        Args:
            fill: is given the arena, (bucket.nbytes,) uint8.
        """
        if self._failure is not None or self._sender is None:
            return
        with self.noted():
            with self._timed("wait"):
                arena = self._sender.arena(bucket)
            with self._timed("convert"):
                fill(arena)
            self._names[bucket.number] = [tensor.name for tensor in planned]
            before = self.seconds["digest"]
            with self._timed("wait"):
                self._sender.publish(bucket, lambda: self._begin_digests(bucket, arena))
            self.seconds["wait"] -= self.seconds["digest"] - before

    def finish(self) -> None:
        """Wait until every receiver has read everything.

        Raises:
            RatchetError: what failed first.
        """
        if self._sender is not None and self._failure is None:
            with self._timed("digest"):  # while receivers read the last bucket
                for number, begun in self._planned.begun().items():
                    self.digests |= zip(self._names[number], begun.read(), strict=True)
            with self.noted(), self._timed("wait"):
                self._sender.finish()
        if self._failure is not None:
            raise self._failure

    def _begin_digests(self, bucket: Bucket, arena: torch.Tensor) -> None:
        with self._timed("digest"):  # of what was packed
            self._planned.begin(bucket.number, arena)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """If the block fails, nothing more is sent, and `finish` raises the failure."""
        try:
            yield
        except RatchetError as error:
            self._failure = error
            if self._sender is None:  # it could not be opened
                fail(self._folder, str(error))
            else:
                self._sender.fail(str(error))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += time.monotonic() - begun


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
