"""Process groups of one sender and all receivers, apart from any other group of their processes."""

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
from trainer_core.weights.channel import Channel
from trainer_core.weights.signals import Signals


class BroadcastGroup:
    """The group in which one sender broadcasts: rank 0 is the sender, the receivers follow by their numbers."""

    def __init__(self, channel: Channel, signals: Signals, sender: int, rank: int, device: torch.device) -> None:
        """Meet the others. They must all come: one that does not ends it with the channel's deadline.

        Raises:
            SyncMismatch: a process has failed or did not come.
        """
        self._signals = signals
        met = signals.met[signals.place[sender]]  # (1 + R,)
        met[rank] = 1
        signals.wait(lambda: met.all(), f"trainer rank {sender} and all engines to meet")
        store = FileStore(str(Path(channel.folder, f"group-{sender}")), 1 + channel.receivers)
        limit = timedelta(seconds=channel.deadline_s)
        make = partial(_group, store, rank, 1 + channel.receivers, limit, device)
        self._group: Any = _connected(signals, make, f"trainer rank {sender} and all engines to connect")

    def broadcast(self, arena: torch.Tensor) -> Callable[[], bool]:
        """Begin to send, or to receive, the bytes of an arena; the result tells whether that is done."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([arena], options).is_completed

    def close(self) -> None:
        """End the group, whether or not everything was sent: an update that failed may have broadcasts under way."""
        self._group.abort()

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Return once a broadcast is done.

        Raises:
            SyncMismatch: a process has failed, or the deadline has passed.
        """
        self._signals.wait(done, what)


def _connected(signals: Signals, make: Callable[[], Any], what: str) -> Any:
    """What `make` returns, which waits for processes that may have died meanwhile; then its thread is abandoned.

    Raises:
        SyncMismatch: a process has failed, or this one cannot connect.
    """
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
        raise SyncMismatch(
            f'a process of the weight update cannot connect to the others: {failure}; set sync.transport to "auto"'
        ) from failure
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
