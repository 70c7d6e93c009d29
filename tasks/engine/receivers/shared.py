"""Receiving from arenas that the sender shows: in shared memory of the host, or on a card by CUDA IPC."""

import torch

from trainer_core.weights.arenas import SharedArenas, open_arenas
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Bucket, WeightPlan
from trainer_core.weights.signals import Signals, Turns


class SharedReceiver:
    """A receiver that sees the senders' arenas."""

    def __init__(self, channel: Channel, plan: WeightPlan, number: int, device: torch.device) -> None:
        self._channel, self._plan, self._number, self._device = channel, plan, number, device
        self._turns = Turns(Signals(channel, plan), channel.arenas)
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._arenas: list[SharedArenas] = []
        self._failed = False

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Receiver.arena`."""
        self._turns.published(bucket)
        if bucket.sender not in self._buffers:
            self._buffers[bucket.sender] = self._open(bucket.sender)
        arena = self._buffers[bucket.sender][self._turns.place_of(bucket)][: bucket.nbytes]
        return arena.to(self._device)  # the same tensor unless it lies in memory of the host and the model on a card

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
        self._buffers = {}
        for arenas in self._arenas:
            arenas.close()
        if self._channel.transport == "cuda":
            from trainer_core.weights import card

            if self._failed:
                card.close_opened()

    def _open(self, sender: int) -> list[torch.Tensor]:
        if self._channel.transport == "memory":
            arenas = open_arenas(self._channel, self._plan, sender)
            if self._device.type == "cuda":
                arenas.pin(self._device)
            self._arenas.append(arenas)
            return arenas.buffers
        from trainer_core.weights import card  # its library comes with torch for CUDA only

        if not self._buffers:
            card.forget_others(self._channel, {bucket.sender for bucket in self._plan.buckets})
        return card.open_arenas(self._channel, self._plan, sender, self._device)
