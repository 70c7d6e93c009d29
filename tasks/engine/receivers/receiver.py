"""What every transport offers to a worker of an engine, and how one is chosen. Imports torch."""

from typing import Protocol

import torch

from tasks.engine.receivers.collective import CollectiveReceiver
from tasks.engine.receivers.files import FilesReceiver
from tasks.engine.receivers.shared import card_receiver, host_receiver
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Bucket, WeightPlan


class Receiver(Protocol):
    """One worker's end of a channel. It reads all buckets, in the order of the plan."""

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """The bytes of a bucket, (bucket.nbytes,) uint8 on the device of the model; waits until they are there.

        They must not be changed, and not be used after `release`.

        Raises:
            SyncMismatch: another end has failed, or does not answer until the deadline.
        """
        ...

    def release(self, bucket: Bucket) -> None:
        """Let the sender use the arena again, once the device has read it."""
        ...

    def fail(self, reason: str) -> None:
        """Tell everybody that this update will not be completed."""
        ...

    def close(self) -> None:
        """Let go of what this end holds. Tensors from `arena` must not be used afterwards."""
        ...


def open_receiver(channel: Channel, plan: WeightPlan, number: int, device: torch.device) -> Receiver:
    """One worker's end of a channel.

    Args:
        number: of this worker among `channel.receivers`.
        device: of the model.
    """
    match channel.transport:
        case "memory":
            return host_receiver(channel, plan, number, device)
        case "cuda":
            return card_receiver(channel, plan, number, device)
        case "collective":
            return CollectiveReceiver(channel, plan, number, device)
        case "files":
            return FilesReceiver(channel, plan, device)
