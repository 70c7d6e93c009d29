"""Sending by broadcasts of a process group of this rank and all receivers."""

from collections.abc import Callable

import torch

from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Bucket, WeightPlan
from trainer_core.weights.process_group import BroadcastGroup
from trainer_core.weights.senders.meanwhile import Meanwhile, idle
from trainer_core.weights.signals import Signals, Turns


class CollectiveSender:
    """Broadcasts each bucket while the next one is written."""

    def __init__(self, group: BroadcastGroup, turns: Turns, rank: int, buffers: list[torch.Tensor]) -> None:
        self._group, self._turns, self._rank, self._buffers = group, turns, rank, buffers
        self._under_way: dict[int, Callable[[], bool]] = {}

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Sender.arena`."""
        place = self._turns.place_of(bucket)
        self._settle(place)
        return self._buffers[place][: bucket.nbytes]

    def publish(self, bucket: Bucket, meanwhile: Meanwhile = idle) -> None:
        """See `Sender.publish`."""
        place = self._turns.place_of(bucket)
        self._turns.publish(bucket)
        self._under_way[place] = self._group.broadcast(self._buffers[place][: bucket.nbytes])
        meanwhile()

    def finish(self) -> None:
        """See `Sender.finish`."""
        for place in list(self._under_way):
            self._settle(place)
        self._turns.read_by_all(self._rank)

    def fail(self, reason: str) -> None:
        """See `Sender.fail`."""
        self._turns.signals.fail(reason)

    def close(self) -> None:
        """See `Sender.close`."""
        self._group.close()
        self._buffers, self._under_way = [], {}

    def _settle(self, place: int) -> None:
        if place in self._under_way:
            self._group.wait(self._under_way.pop(place), f"engines to receive what rank {self._rank} sent")


def collective_sender(channel: Channel, plan: WeightPlan, rank: int, device: torch.device) -> CollectiveSender:
    """A sender by NCCL from a card, by gloo from memory of the host. Returns when all receivers have come."""
    signals = Signals(channel, plan)
    group = BroadcastGroup(channel, signals, rank, 0, device)
    buffers = [torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device) for _ in range(channel.arenas)]
    return CollectiveSender(group, Turns(signals, channel.arenas), rank, buffers)
