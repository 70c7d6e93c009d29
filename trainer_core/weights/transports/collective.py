"""Broadcasts of process groups: each of one sender and all receivers, apart from any other group of their processes."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from storage.errors import SyncMismatch
from trainer_core.weights.channel import Channel, Signals
from trainer_core.weights.plan import Bucket, WeightPlan


class BroadcastGroup:
    """The group in which one sender broadcasts: rank 0 is the sender, the receivers follow by their numbers."""

    def __init__(self, channel: Channel, signals: Signals, sender: int, rank: int, device: torch.device) -> None:
        """Meet all others. Raises SyncMismatch if a process has failed, or does not come until the deadline."""
        met = signals.met[signals.place[sender]]  # (1 + R,)
        met[rank] = 1
        signals.wait(lambda: met.all(), f"trainer rank {sender} and all engines to meet")
        store = FileStore(str(Path(channel.folder, f"group-{sender}")), 1 + channel.receivers)
        limit = timedelta(seconds=channel.deadline_s)
        make = partial(_group, store, rank, 1 + channel.receivers, limit, device)
        self._group: Any = _connected(signals, make, f"trainer rank {sender} and all engines to connect")

    def broadcast(self, arena: torch.Tensor) -> Callable[[], bool]:
        """Begin to send, or to receive, the bytes of an arena; the result says if that is done."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([arena], options).is_completed

    def close(self) -> None:
        """End the group, whether or not everything was sent: an update that failed may have broadcasts under way."""
        self._group.abort()


def _connected(signals: Signals, make: Callable[[], Any], what: str) -> Any:
    """The result of `make`, which waits for processes that may have died meanwhile; then its thread is abandoned.
    Raises SyncMismatch if a process has failed, or this one cannot connect."""
    made: list[Any] = []
    failures: list[RuntimeError] = []

    def run() -> None:
        try:
            made.append(make())
        except RuntimeError as error:  # as torch raises it
            failures.append(error)

    Thread(target=run, name="ratchet-process-group", daemon=True).start()
    signals.wait(lambda: bool(made or failures), what)
    if failures:
        (failure,) = failures
        fact = f"a process of the weight update cannot connect to the others: {failure}"
        raise SyncMismatch(f'{fact}; set sync.transport to "auto"') from failure
    return made[0]


def _group(store: Store, rank: int, size: int, limit: timedelta, device: torch.device) -> Any:
    """A process group of its own: NCCL between cards, gloo between memories of hosts."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    with torch.cuda.device(device):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)  # or the first broadcast would, and wait where nothing stops it
    return group


class CollectiveSender:
    def __init__(self, channel: Channel, plan: WeightPlan, rank: int, device: torch.device) -> None:
        """Meet all receivers; by NCCL from a card, by gloo from memory of the host."""
        self._signals, self._rank = Signals(channel, plan), rank
        self._group = BroadcastGroup(channel, self._signals, rank, 0, device)
        empty = partial(torch.empty, plan.arena_bytes, dtype=torch.uint8, device=device)
        self._buffers = [empty() for _ in range(channel.arenas)]  # (arena_bytes,) each
        self._under_way: dict[int, Callable[[], bool]] = {}

    def arena(self, bucket: Bucket) -> torch.Tensor:
        place = self._signals.place_of(bucket)
        self._settle(place)
        return self._buffers[place][: bucket.nbytes]

    def publish(self, bucket: Bucket, meanwhile: Callable[[], object] = lambda: None) -> None:
        place = self._signals.place_of(bucket)
        self._signals.publish(bucket)
        self._under_way[place] = self._group.broadcast(self._buffers[place][: bucket.nbytes])
        meanwhile()

    def finish(self) -> None:
        for place in list(self._under_way):
            self._settle(place)
        self._signals.read_by_all(self._rank)

    def fail(self, reason: str) -> None:
        self._signals.fail(reason)

    def close(self) -> None:
        self._group.close()
        self._buffers, self._under_way = [], {}

    def _settle(self, place: int) -> None:
        if place in self._under_way:
            self._signals.wait(self._under_way.pop(place), f"engines to receive what rank {self._rank} sent")


class CollectiveReceiver:
    def __init__(self, channel: Channel, plan: WeightPlan, number: int, device: torch.device) -> None:
        self._channel, self._number, self._device = channel, number, device
        self._signals = Signals(channel, plan)
        self._groups: dict[int, BroadcastGroup] = {}
        self._buffer = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device)  # (arena_bytes,)

    def arena(self, bucket: Bucket) -> torch.Tensor:
        if not self._groups:  # all in one order: each of them waits for every receiver
            for sender in self._signals.place:
                group = BroadcastGroup(self._channel, self._signals, sender, 1 + self._number, self._device)
                self._groups[sender] = group
        self._signals.published(bucket)
        arena = self._buffer[: bucket.nbytes]
        done = self._groups[bucket.sender].broadcast(arena)
        self._signals.wait(done, f"bucket {bucket.number} from trainer rank {bucket.sender}")
        return arena

    def release(self, bucket: Bucket) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._signals.release(bucket, self._number)

    def fail(self, reason: str) -> None:
        self._signals.fail(reason)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups, self._buffer = {}, self._buffer[:0]
