"""The two ends of a channel, whatever its transport, and how one is chosen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from storage.errors import RatchetError
from trainer_core.weights.channel import Channel, fail
from trainer_core.weights.plan import Bucket, WeightPlan
from trainer_core.weights.transports.collective import CollectiveReceiver, CollectiveSender
from trainer_core.weights.transports.files import FilesReceiver, FilesSender
from trainer_core.weights.transports.shared import HostOpener, SharedReceiver, SharedSender, host_sender


class End(Protocol):
    """Either end of a channel. Tensors from `arena` must not be used after `close`."""

    def fail(self, reason: str) -> None:
        """Stop all other ends: this update will not be completed."""

    def close(self) -> None:
        """Release what this end holds."""


class Sender(End, Protocol):
    """The end of a channel at a trainer rank. It sends its own buckets, in the order of the plan."""

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """The arena for a bucket, (bucket.nbytes,) uint8 on the device of the model; waits until it is free. Raises
        SyncMismatch if another end has failed, or does not answer until the deadline."""
        ...

    def publish(self, bucket: Bucket, meanwhile: Callable[[], object] = ...) -> None:
        """Let the receivers read a bucket, once the device has written it. `meanwhile` is called once, while the device
        writes, or while the receivers read. Raises StorageUnavailable if a file of it cannot be written."""

    def finish(self) -> None:
        """Wait until every receiver has read everything; raises as `arena`."""


class Receiver(End, Protocol):
    """The end of a channel at a worker of an engine. It reads all buckets, in the order of the plan."""

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """The bytes of a bucket, (bucket.nbytes,) uint8 on the device of the model; waits until they are there. They
        must not be changed, and not be used after `release`. Raises SyncMismatch if another end has failed, does not
        answer until the deadline, or sends other tensors than planned. Raises StorageUnavailable if the arenas cannot
        be opened from here."""
        ...

    def release(self, bucket: Bucket) -> None:
        """Let the sender use the arena again, once the device has read it."""


def open_sender(channel: Channel, plan: WeightPlan, rank: int, device: torch.device) -> Sender:
    """The end of a channel at a rank. Exactly the ranks that send a bucket call it; they do not wait for each other.
    Raises StorageUnavailable if there is no room for the arenas. Raises SyncMismatch if the receivers do not answer."""
    match channel.transport:
        case "memory":
            return host_sender(channel, plan, rank, device)
        case "cuda":
            from trainer_core.weights.transports.card import export_arenas  # its library comes with torch for CUDA only

            return SharedSender(channel, plan, rank, export_arenas(channel, plan, rank, device), lambda: None)
        case "collective":
            return CollectiveSender(channel, plan, rank, device)
        case "files":
            return FilesSender(channel, plan, device)


def open_receiver(channel: Channel, plan: WeightPlan, number: int, device: torch.device) -> Receiver:
    """The end of a channel at worker `number` among `channel.receivers`, whose model is on that device."""
    match channel.transport:
        case "memory":
            return SharedReceiver(channel, plan, number, device, HostOpener(channel, plan, device))
        case "cuda":
            from trainer_core.weights.transports.card import CardOpener  # likewise

            return SharedReceiver(channel, plan, number, device, CardOpener(channel, plan, device))
        case "collective":
            return CollectiveReceiver(channel, plan, number, device)
        case "files":
            return FilesReceiver(channel, plan, device)


@contextmanager
def receiving(channel: Channel, plan: WeightPlan, number: int, device: torch.device) -> Iterator[Receiver]:
    """`open_receiver` for a block. The other ends are told of an error, also of one here, or they would wait."""
    try:
        receiver = open_receiver(channel, plan, number, device)
    except BaseException as error:
        fail(channel.folder, f"an engine cannot receive: {error}")
        raise
    try:
        yield receiver
    except BaseException as error:
        receiver.fail(str(error) if isinstance(error, RatchetError) else f"an engine failed: {error!r}")
        raise
    finally:
        receiver.close()
