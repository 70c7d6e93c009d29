"""Sending through arenas that the receivers see too: in shared memory of the host, or on a card by CUDA IPC."""

from collections.abc import Callable

import torch

from trainer_core.weights.arenas import make_arenas
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Bucket, WeightPlan
from trainer_core.weights.senders.meanwhile import Meanwhile, idle
from trainer_core.weights.signals import Signals, Turns


class SharedSender:
    """A sender whose arenas the receivers see."""

    def __init__(self, turns: Turns, rank: int, buffers: list[torch.Tensor], close: Callable[[], None]) -> None:
        """Args:
        buffers: the arenas, (arena_bytes,) uint8 each.
        close: lets go of them.
        """
        self._turns, self._rank, self._buffers, self._close = turns, rank, buffers, close

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Sender.arena`."""
        self._turns.free(bucket)
        return self._buffers[self._turns.place_of(bucket)][: bucket.nbytes]

    def publish(self, bucket: Bucket, meanwhile: Meanwhile = idle) -> None:
        """See `Sender.publish`."""
        if not self._buffers[0].is_cuda:
            self._turns.publish(bucket)
            meanwhile()
            return
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(self._buffers[0].device))
        meanwhile()  # what it launches is not waited for
        written.synchronize()
        self._turns.publish(bucket)

    def finish(self) -> None:
        """See `Sender.finish`."""
        self._turns.read_by_all(self._rank)

    def fail(self, reason: str) -> None:
        """See `Sender.fail`."""
        self._turns.signals.fail(reason)

    def close(self) -> None:
        """See `Sender.close`."""
        self._buffers = []
        self._close()


class StagedSender(SharedSender):
    """A sender from a card through shared memory of the host: for engines that cannot open arenas on this card."""

    def __init__(
        self, turns: Turns, rank: int, buffers: list[torch.Tensor], close: Callable[[], None], device: torch.device
    ) -> None:
        super().__init__(turns, rank, buffers, close)
        self._staging = torch.empty_like(buffers[0], device=device)  # (arena_bytes,)

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Sender.arena`."""
        return self._staging[: bucket.nbytes]

    def publish(self, bucket: Bucket, meanwhile: Meanwhile = idle) -> None:
        """See `Sender.publish`."""
        super().arena(bucket).copy_(self._staging[: bucket.nbytes])  # waits for the device
        super().publish(bucket, meanwhile)


def memory_sender(channel: Channel, plan: WeightPlan, rank: int, device: torch.device) -> SharedSender:
    """A sender through shared memory of the host."""
    turns = Turns(Signals(channel, plan), channel.arenas)
    arenas = make_arenas(channel, plan, rank)
    if device.type == "cpu":
        return SharedSender(turns, rank, arenas.buffers, arenas.close)
    arenas.pin(device)
    return StagedSender(turns, rank, arenas.buffers, arenas.close, device)


def cuda_sender(channel: Channel, plan: WeightPlan, rank: int, device: torch.device) -> SharedSender:
    """A sender through arenas on its own card."""
    from trainer_core.weights.card import export_arenas  # its library comes with torch for CUDA only

    turns = Turns(Signals(channel, plan), channel.arenas)
    return SharedSender(turns, rank, export_arenas(channel, plan, rank, device), lambda: None)
