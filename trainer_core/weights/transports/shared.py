"""Arenas that both ends see: in shared memory of the host, as a file of each sender, or on a card by CUDA IPC."""

import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from storage.errors import StorageUnavailable
from trainer_core.platform.pinning import Pinning, pinning_of
from trainer_core.weights.channel import Channel, Signals
from trainer_core.weights.plan import Bucket, WeightPlan

Seen = tuple[list[torch.Tensor], bool]
"""Arenas of a sender, (arena_bytes,) uint8 each; and True if they lie in the memory that the model is in, so that
loaders may read them as often as they like."""


class SharedArenas:
    """The arenas of one sender in shared memory of the host, as seen from one end."""

    def __init__(self, channel: Channel, plan: WeightPlan, sender: int, new: bool = False) -> None:
        """Make the arenas if they are `new`, else open the sender's. Raises StorageUnavailable if there is no room."""
        self._path, size = Path(channel.folder, f"arenas-{sender}"), channel.arenas * plan.arena_bytes
        handle = os.open(self._path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)
        try:
            if new:
                os.posix_fallocate(handle, 0, size)  # or a later write would end the process
            self._whole = torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)  # keeps the mapping
        except OSError as error:
            raise StorageUnavailable(
                f"{channel.arenas} arenas of {plan.arena_bytes >> 20} MiB for a weight update do not fit into "
                f"{channel.folder}: {error}; free shared memory there or lower sync.arena_mib"
            ) from error
        finally:
            os.close(handle)
        self.buffers = list(self._whole.split(plan.arena_bytes))  # (arena_bytes,) each
        self._pinning: Pinning | None = None

    def pin(self, device: torch.device) -> None:
        """Let a card copy from and to the arenas at the speed of the link. Where that is refused it copies slowly.
        Raises WorkerLost if the card does not work."""
        pinning = pinning_of(device)
        if pinning is not None and pinning.pin(self._whole, self._path):
            self._pinning = pinning

    def close(self) -> None:
        self.buffers = []
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning.release(self._whole)


class SharedSender:
    def __init__(
        self,
        channel: Channel,
        plan: WeightPlan,
        rank: int,
        buffers: list[torch.Tensor],
        close: Callable[[], object],
        staging: torch.Tensor | None = None,
    ) -> None:
        """Take arenas, (arena_bytes,) uint8 each, which `close` releases; with `staging`, (arena_bytes,) on the card of
        the weights, if they are in memory of the host."""
        self._signals, self._rank = Signals(channel, plan), rank
        self._buffers, self._close, self._staging = buffers, close, staging

    def arena(self, bucket: Bucket) -> torch.Tensor:
        return self._free(bucket) if self._staging is None else self._staging[: bucket.nbytes]

    def publish(self, bucket: Bucket, meanwhile: Callable[[], object] = lambda: None) -> None:
        if self._staging is not None:
            self._free(bucket).copy_(self._staging[: bucket.nbytes])  # waits for the device
        if not self._buffers[0].is_cuda:
            self._signals.publish(bucket)
            meanwhile()
            return
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(self._buffers[0].device))
        meanwhile()  # what it launches is not waited for
        written.synchronize()
        self._signals.publish(bucket)

    def finish(self) -> None:
        self._signals.read_by_all(self._rank)

    def fail(self, reason: str) -> None:
        self._signals.fail(reason)

    def close(self) -> None:
        self._buffers = []
        self._close()

    def _free(self, bucket: Bucket) -> torch.Tensor:
        """The arena of a bucket, as soon as every receiver has released it."""
        self._signals.free(bucket)
        return self._buffers[self._signals.place_of(bucket)][: bucket.nbytes]


def host_sender(channel: Channel, plan: WeightPlan, rank: int, device: torch.device) -> SharedSender:
    arenas = SharedArenas(channel, plan, rank, new=True)
    arenas.pin(device)
    staging = None if device.type == "cpu" else torch.empty_like(arenas.buffers[0], device=device)
    return SharedSender(channel, plan, rank, arenas.buffers, arenas.close, staging)


class Opener(Protocol):
    """Finds the arenas of senders."""

    def open(self, sender: int) -> Seen:
        """Open the arenas of a sender that has published. Raises StorageUnavailable if they cannot be opened here."""
        ...

    def close(self, failed: bool) -> None:
        """Release all arenas."""


class HostOpener:
    """Finds arenas in shared memory of the host."""

    def __init__(self, channel: Channel, plan: WeightPlan, device: torch.device) -> None:
        self._channel, self._plan, self._device = channel, plan, device
        self._arenas: list[SharedArenas] = []

    def open(self, sender: int) -> Seen:
        self._arenas.append(arenas := SharedArenas(self._channel, self._plan, sender))
        arenas.pin(self._device)
        return arenas.buffers, self._device.type == "cpu"

    def close(self, failed: bool) -> None:
        for arenas in self._arenas:
            arenas.close()


class SharedReceiver:
    def __init__(self, channel: Channel, plan: WeightPlan, number: int, device: torch.device, opener: Opener) -> None:
        """`number` is that of this worker among the receivers, `device` that of the model."""
        self._plan, self._number, self._device, self._opener = plan, number, device, opener
        self._signals = Signals(channel, plan)
        self._seen: dict[int, Seen] = {}
        self._fetcher = Fetcher(plan, device)
        self._reading: tuple[Bucket, torch.cuda.Event] | None = None
        self._failed = False

    def arena(self, bucket: Bucket) -> torch.Tensor:
        if not self._signals.is_published(bucket):
            self._settle()  # the sender may wait for that arena
        self._signals.published(bucket)
        arena = self._shown(bucket)
        if not self._is_near(bucket):
            arena = self._fetcher.fetched(bucket, arena)
            self._signals.release(bucket, self._number)  # it was read over the link, once
        self._look_ahead(bucket)
        return arena

    def release(self, bucket: Bucket) -> None:
        """A card reads it while this process launches what reads the next bucket."""
        self._settle()
        if not self._is_near(bucket):
            self._fetcher.release()
        elif (read := _now(self._device)) is not None:
            self._reading = bucket, read
        else:
            self._signals.release(bucket, self._number)
        if bucket.number == self._plan.buckets[-1].number:
            self._settle()

    def fail(self, reason: str) -> None:
        self._failed = True
        self._signals.fail(reason)

    def close(self) -> None:
        self._seen = {}
        self._fetcher.close()
        self._opener.close(self._failed)

    def _settle(self) -> None:
        """Wait until the card has read what it was given to read, and tell the sender."""
        if self._reading is not None:
            bucket, read = self._reading
            read.synchronize()
            self._signals.release(bucket, self._number)
            self._reading = None

    def _shown(self, bucket: Bucket) -> torch.Tensor:
        if bucket.sender not in self._seen:
            self._seen[bucket.sender] = self._opener.open(bucket.sender)
        return self._seen[bucket.sender][0][self._signals.place_of(bucket)][: bucket.nbytes]

    def _is_near(self, bucket: Bucket) -> bool:
        return bucket.sender in self._seen and self._seen[bucket.sender][1]

    def _look_ahead(self, bucket: Bucket) -> None:
        """Begin to fetch the next bucket that lies elsewhere, if it can be read already, while this one is loaded."""
        later = (one for one in self._plan.buckets[bucket.number + 1 :] if not self._is_near(one))
        following = next(later, None)
        if following is not None and self._signals.is_published(following):
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
        """The bytes of a bucket, as soon as they were copied."""
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
        if self._stream is not None:
            self._stream.synchronize()  # what is copied may be given up
        self._buffers, self._ahead = [], None


def _now(device: torch.device) -> torch.cuda.Event | None:
    """Event of a card, behind the work that it was given until now; None if the device is not a card."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
