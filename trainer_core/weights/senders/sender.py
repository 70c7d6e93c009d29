"""What every transport offers to a trainer rank, and how one is chosen."""

from typing import Protocol

import torch

from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Bucket, WeightPlan
from trainer_core.weights.senders.collective import collective_sender
from trainer_core.weights.senders.files import FilesSender
from trainer_core.weights.senders.meanwhile import Meanwhile, idle
from trainer_core.weights.senders.shared import cuda_sender, memory_sender


class Sender(Protocol):
    """One rank's end of a channel. It sends its own buckets, in the order of the plan."""

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """Where to write a bucket, (bucket.nbytes,) uint8 on the device of the model; waits until that is free.

        Raises:
            SyncMismatch: another end has failed, or does not answer until the deadline.
        """
        ...

    def publish(self, bucket: Bucket, meanwhile: Meanwhile = idle) -> None:
        """Let the receivers read a bucket, once the device has written it.

        Args:
            meanwhile: is called once, while the device writes, or while the receivers read.
        """
        ...

    def finish(self) -> None:
        """Wait until every receiver has read everything.

        Raises:
            SyncMismatch: another end has failed, or does not answer until the deadline.
        """
        ...

    def fail(self, reason: str) -> None:
        """Tell everybody that this update will not be completed."""
        ...

    def close(self) -> None:
        """Let go of what this end holds. Tensors from `arena` must not be used afterwards."""
        ...


def open_sender(channel: Channel, plan: WeightPlan, rank: int, device: torch.device) -> Sender:
    """One rank's end of a channel. Exactly the ranks that send at least one bucket call it; they do not wait for each
    other.

    Args:
        rank: as `Bucket.sender` names it.
        device: of the model.

    Raises:
        StorageUnavailable: there is no room for the arenas.
        SyncMismatch: the receivers do not answer.
    """
    match channel.transport:
        case "memory":
            return memory_sender(channel, plan, rank, device)
        case "cuda":
            return cuda_sender(channel, plan, rank, device)
        case "collective":
            return collective_sender(channel, plan, rank, device)
        case "files":
            return FilesSender(channel, plan, device)
