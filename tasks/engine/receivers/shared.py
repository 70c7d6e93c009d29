"""Receiving from arenas that the sender shows: in shared memory of the host, or on a card by CUDA IPC."""

from dataclasses import dataclass
from functools import partial
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
        self._fetcher = Fetcher(plan, device)
        self._reading: tuple[Bucket, torch.cuda.Event] | None = None
        self._failed = False

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Receiver.arena`."""
        if not self._turns.is_published(bucket):
            self._settle()  # the sender may wait for that arena
        self._turns.published(bucket)
        arena = self._shown(bucket)
        if not self._is_near(bucket):
            arena = self._fetcher.fetched(bucket, arena)
            self._turns.release(bucket, self._number)  # it was read over the link, once
        self._look_ahead(bucket)
        return arena

    def release(self, bucket: Bucket) -> None:
        """See `Receiver.release`. A card reads it while this process launches what reads the next one."""
        self._settle()
        if not self._is_near(bucket):
            self._fetcher.release()
        elif (read := _now(self._device)) is not None:
            self._reading = bucket, read
        else:
            self._turns.release(bucket, self._number)
        if bucket.number == self._plan.buckets[-1].number:
            self._settle()

    def fail(self, reason: str) -> None:
        """See `Receiver.fail`."""
        self._failed = True
        self._turns.signals.fail(reason)

    def close(self) -> None:
        """See `Receiver.close`."""
        self._seen = {}
        self._fetcher.close()
        self._opener.close(self._failed)

    def _settle(self) -> None:
        """Wait until the card has read what it was given to read, and tell the sender."""
        if self._reading is not None:
            bucket, read = self._reading
            read.synchronize()
            self._turns.release(bucket, self._number)
            self._reading = None

    def _shown(self, bucket: Bucket) -> torch.Tensor:
        """Where a bucket lies that can be read."""
        if bucket.sender not in self._seen:
            self._seen[bucket.sender] = self._opener.open(bucket.sender)
        return self._seen[bucket.sender].buffers[self._turns.place_of(bucket)][: bucket.nbytes]

    def _is_near(self, bucket: Bucket) -> bool:
        return bucket.sender in self._seen and self._seen[bucket.sender].near

    def _look_ahead(self, bucket: Bucket) -> None:
        """Begin to fetch the next bucket that lies elsewhere, if it can be read already, while this one is loaded."""
        later = (one for one in self._plan.buckets[bucket.number + 1 :] if not self._is_near(one))
        following = next(later, None)
        if following is not None and self._turns.is_published(following):
            arena = self._shown(following)
            if not self._is_near(following):
                self._fetcher.begin(following, arena)


class Fetcher:
    """Copies what distant arenas hold into buffers beside the model, a bucket ahead of the one that is loaded."""

    def __init__(self, plan: WeightPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._buffers: list[torch.Tensor] = []  # (arena_bytes,) each: the first is filled, the other is loaded from
        self._read: list[torch.cuda.Event | None] = [None, None]  # when the card has read what each held before
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: Bucket | None = None  # what the first buffer is filled with

    def begin(self, bucket: Bucket, arena: torch.Tensor) -> None:
        """Begin to copy a bucket, unless one is under way."""
        if self._ahead is not None:
            return
        if not self._buffers:
            empty = partial(torch.empty, self._plan.arena_bytes, dtype=torch.uint8, device=self._device)
            self._buffers = [empty(), empty()]
        self._buffers.reverse()
        self._read.reverse()
        if self._stream is not None:
            if (read := self._read[0]) is not None:
                self._stream.wait_event(read)
            else:  # new memory, which the card may still use for something else
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # no effect on CPU
            self._buffers[0][: bucket.nbytes].copy_(arena, non_blocking=True)
        self._ahead = bucket

    def fetched(self, bucket: Bucket, arena: torch.Tensor) -> torch.Tensor:
        """What a bucket holds, as soon as it was copied."""
        self.begin(bucket, arena)
        assert self._ahead == bucket, "buckets are read in the order of the plan"
        if self._stream is not None:
            self._stream.synchronize()
        self._ahead = None
        return self._buffers[0][: bucket.nbytes]

    def release(self) -> None:
        """The card was given everything that reads the bucket that was fetched last."""
        self._read[0 if self._ahead is None else 1] = _now(self._device)

    def close(self) -> None:
        """Let go of the buffers."""
        if self._stream is not None:
            self._stream.synchronize()  # what is copied may be given up
        self._buffers, self._ahead = [], None


def _now(device: torch.device) -> torch.cuda.Event | None:
    """When a card has done what it was given until now; None if it is no card, where nothing is left to do."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


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
