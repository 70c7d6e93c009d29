"""One trainer rank's part of an update, sent bucket by bucket, with digests and times. Needs no Megatron."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from storage.errors import RatchetError
from trainer_core.model.mesh import Mesh
from trainer_core.weights.channel import Channel, fail
from trainer_core.weights.digest import PlannedDigests
from trainer_core.weights.plan import Bucket, PlannedTensor, WeightPlan
from trainer_core.weights.transports.ends import Sender, open_sender


class BucketSender(AbstractContextManager["BucketSender", None]):
    """Sends buckets until the first failure; its rank then continues the collectives, and raises it at the end."""

    def __init__(self, channel: Channel, plan: WeightPlan, mesh: Mesh, digests: PlannedDigests) -> None:
        self._folder, self._planned = channel.folder, digests
        self._sender: Sender | None = None
        self._failure: RatchetError | None = None
        self._names: dict[int, list[str]] = {}  # of what each bucket brought
        self.digests: dict[str, str] = {}  # digests of tensors that were sent, by name; complete after `finish`
        self.seconds = {"convert": 0.0, "wait": 0.0, "digest": 0.0}
        if any(bucket.sender == mesh.rank for bucket in plan.buckets):
            with self.noted():
                self._sender = open_sender(channel, plan, mesh.rank, mesh.device)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._sender is not None:
            if error is not None:
                self._sender.fail(f"a trainer rank failed: {error}")
            self._sender.close()

    def send(self, bucket: Bucket, planned: Sequence[PlannedTensor], fill: Callable[[torch.Tensor], object]) -> None:
        """Publish a bucket, whose arena, (bucket.nbytes,) uint8, `fill` writes; does nothing after a failure."""
        if self._failure is not None or self._sender is None:
            return

        def begin_digests() -> None:
            with self._timed("digest"):  # of what was packed
                self._planned.begin(bucket.number, arena)

        with self.noted():
            with self._timed("wait"):
                arena = self._sender.arena(bucket)
            with self._timed("convert"):
                fill(arena)
            self._names[bucket.number] = [tensor.name for tensor in planned]
            before = self.seconds["digest"]
            with self._timed("wait"):
                self._sender.publish(bucket, begin_digests)
            self.seconds["wait"] -= self.seconds["digest"] - before

    def finish(self) -> None:
        """Wait until every receiver has read everything. Raises the first failure."""
        if self._sender is not None and self._failure is None:
            with self._timed("digest"):  # while receivers read the last bucket
                for number, begun in self._planned.begun().items():
                    self.digests |= zip(self._names[number], begun.read(), strict=True)
            with self.noted(), self._timed("wait"):
                self._sender.finish()
        if self._failure is not None:
            raise self._failure

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
