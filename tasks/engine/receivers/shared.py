"""Receiving from arenas that the sender shows: in shared memory of the host, or on a card by CUDA IPC."""

from dataclasses import dataclass
from typing import Protocol

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
    """Whether they lie in the memory that the model is in, so that loaders may read them as often as they like."""


class Opener(Protocol):
    """What finds the arenas of senders."""

    def open(self, sender: int) -> Seen:
        """Those of a sender that has published something.

        Raises:
            StorageUnavailable: they cannot be opened from here.
        """
        ...

    def close(self, failed: bool) -> None:
        """Let go of all."""
        ...


class SharedReceiver:
    """A receiver that sees the senders' arenas."""

    def __init__(self, channel: Channel, plan: WeightPlan, number: int, device: torch.device, opener: Opener) -> None:
        """Args:
        number: of this worker among the receivers.
        device: of the model.
        """
        self._plan, self._number, self._device, self._opener = plan, number, device, opener
        self._turns = Turns(Signals(channel, plan), channel.arenas)
        self._seen: dict[int, Seen] = {}
        self._own: torch.Tensor | None = None  # (arena_bytes,) on the device
        self._failed = False

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Receiver.arena`."""
        self._turns.published(bucket)
        if bucket.sender not in self._seen:
            self._seen[bucket.sender] = self._opener.open(bucket.sender)
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
        """See `Receiver.close`."""
        self._seen, self._own = {}, None
        self._opener.close(self._failed)

    def _fetched(self, bucket: Bucket, arena: torch.Tensor) -> torch.Tensor:
        """What a distant arena holds: read over the link once, after which its sender may use it again."""
        if self._own is None:
            self._own = torch.empty(self._plan.arena_bytes, dtype=torch.uint8, device=self._device)
        own = self._own[: bucket.nbytes]
        own.copy_(arena)
        self.release(bucket)  # once it is read
        return own


class HostOpener:
    """Finds arenas in shared memory of the host."""

    def __init__(self, channel: Channel, plan: WeightPlan, device: torch.device) -> None:
        self._channel, self._plan, self._device = channel, plan, device
        self._arenas: list[SharedArenas] = []

    def open(self, sender: int) -> Seen:
        """See `Opener.open`."""
        arenas = open_arenas(self._channel, self._plan, sender)
        if self._device.type == "cuda":
            arenas.pin(self._device)
        self._arenas.append(arenas)
        return Seen(arenas.buffers, near=self._device.type == "cpu")

    def close(self, failed: bool) -> None:
        """See `Opener.close`."""
        for arenas in self._arenas:
            arenas.close()


class CardOpener:
    """Finds arenas on cards. They stay open for the next update, unless this one has failed."""

    def __init__(self, channel: Channel, plan: WeightPlan, device: torch.device) -> None:
        self._channel, self._plan, self._device = channel, plan, device
        self._handles: set[bytes] = set()

    def open(self, sender: int) -> Seen:
        """See `Opener.open`."""
        from trainer_core.weights.card import open_arenas  # its library comes with torch for CUDA only

        opened = open_arenas(self._channel, self._plan, sender, self._device)
        self._handles |= opened.handles
        return Seen(opened.buffers, opened.near)

    def close(self, failed: bool) -> None:
        """See `Opener.close`."""
        from trainer_core.weights.card import close_opened

        close_opened(keep=set() if failed else self._handles)


def host_receiver(channel: Channel, plan: WeightPlan, number: int, device: torch.device) -> SharedReceiver:
    """A receiver through shared memory of the host."""
    return SharedReceiver(channel, plan, number, device, HostOpener(channel, plan, device))


def card_receiver(channel: Channel, plan: WeightPlan, number: int, device: torch.device) -> SharedReceiver:
    """A receiver from arenas on the senders' cards."""
    return SharedReceiver(channel, plan, number, device, CardOpener(channel, plan, device))
