"""Receiving the broadcasts of each sender's process group."""

import torch

from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Bucket, WeightPlan
from trainer_core.weights.process_group import BroadcastGroup
from trainer_core.weights.signals import Signals, Turns


class CollectiveReceiver:
    """A receiver in the groups of all senders."""

    def __init__(self, channel: Channel, plan: WeightPlan, number: int, device: torch.device) -> None:
        self._channel, self._number, self._device = channel, number, device
        self._turns = Turns(Signals(channel, plan), channel.arenas)
        self._groups: dict[int, BroadcastGroup] = {}
        self._senders = sorted({bucket.sender for bucket in plan.buckets})
        self._buffer = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device)  # (arena_bytes,)

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Receiver.arena`."""
        if not self._groups:  # all in one order: each of them waits for every receiver
            for sender in self._senders:
                signals, rank = self._turns.signals, 1 + self._number
                self._groups[sender] = BroadcastGroup(self._channel, signals, sender, rank, self._device)
        self._turns.published(bucket)
        arena, group = self._buffer[: bucket.nbytes], self._groups[bucket.sender]
        group.wait(group.broadcast(arena), f"bucket {bucket.number} from trainer rank {bucket.sender}")
        return arena

    def release(self, bucket: Bucket) -> None:
        """See `Receiver.release`."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._turns.release(bucket, self._number)

    def fail(self, reason: str) -> None:
        """See `Receiver.fail`."""
        self._turns.signals.fail(reason)

    def close(self) -> None:
        """See `Receiver.close`."""
        for group in self._groups.values():
            group.close()
        self._groups, self._buffer = {}, self._buffer[:0]
