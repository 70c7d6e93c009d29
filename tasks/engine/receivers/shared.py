"""Receiving from arenas that the sender shows: in shared memory of the host, or on a card by CUDA IPC."""

from dataclasses import dataclass

import torch

from trainer_core.weights.arenas import SharedArenas, open_arenas
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Bucket, WeightPlan
from trainer_core.weights.signals import Signals, Turns


@dataclass(frozen=True)
class Seen:
    """Arenas of a sender."""

    buffers: list[torch.Tensor]
    """(arena_bytes,) uint8 each."""
    near: bool
    """Whether they lie in the memory that the model is in."""


class SharedReceiver:
    """A receiver that sees the senders' arenas."""

    def __init__(self, channel: Channel, plan: WeightPlan, number: int, device: torch.device) -> None:
        self._channel, self._plan, self._number, self._device = channel, plan, number, device
        self._turns = Turns(Signals(channel, plan), channel.arenas)
        self._senders = {bucket.sender for bucket in plan.buckets}
        self._seen: dict[int, Seen] = {}
        self._arenas: list[SharedArenas] = []
        self._own: torch.Tensor | None = None  # (arena_bytes,) on the device
        self._failed = False

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Receiver.arena`."""
        self._turns.published(bucket)
        if bucket.sender not in self._seen:
            self._seen[bucket.sender] = self._open(bucket.sender)
        seen = self._seen[bucket.sender]
        arena = seen.buffers[self._turns.place_of(bucket)][: bucket.nbytes]
        return arena if seen.near else self._fetched(bucket, arena)

    def release(self, bucket: Bucket) -> None:
        """See `Receiver.release`."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._turns.release(bucket, self._number)

    def fail(self, reason: str) -> None:
        """See `Receiver.fail`."""
        self._failed = True
        self._turns.signals.fail(reason)

    def close(self) -> None:
        """See `Receiver.close`. Arenas on a card stay open for the next update, unless this one has failed."""
        self._seen, self._own = {}, None
        for arenas in self._arenas:
            arenas.close()
        if self._channel.transport == "cuda":
            from trainer_core.weights import card

            if self._failed:
                card.close_opened()

    def _fetched(self, bucket: Bucket, arena: torch.Tensor) -> torch.Tensor:
        """What a distant arena holds, on the device: read over the link once, after which its sender may go on."""
        if self._own is None:
            self._own = torch.empty(self._plan.arena_bytes, dtype=torch.uint8, device=self._device)
        own = self._own[: bucket.nbytes]
        own.copy_(arena)
        self.release(bucket)
        return own

    def _open(self, sender: int) -> Seen:
        if self._channel.transport == "memory":
            arenas = open_arenas(self._channel, self._plan, sender)
            if self._device.type == "cuda":
                arenas.pin(self._device)
            self._arenas.append(arenas)
            return Seen(arenas.buffers, near=self._device.type == "cpu")
        from trainer_core.weights import card  # its library comes with torch for CUDA only

        opened = card.open_arenas(self._channel, self._plan, sender, self._device)
        if self._senders == {*self._seen, sender}:  # all have told their handles
            card.forget_others(self._channel, self._senders)
        return Seen(opened.buffers, opened.near)
