"""Arenas in shared memory of the host: a file of each sender, which the receivers map too."""

import mmap
import os
from pathlib import Path

import torch

from storage.errors import StorageUnavailable
from trainer_core.platform.pinning import Pinning, pinning_of
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import WeightPlan


class SharedArenas:
    """The arenas of one sender, as seen from one end."""

    def __init__(self, path: Path, file: mmap.mmap, arena_bytes: int) -> None:
        self._path = path
        self._whole = torch.frombuffer(file, dtype=torch.uint8)  # keeps the mapping
        self.buffers = list(self._whole.split(arena_bytes))  # (arena_bytes,) each
        self._pinning: Pinning | None = None

    def pin(self, device: torch.device) -> None:
        """Let a card copy from and to the arenas at the speed of the link. Where that is refused it copies slowly.

        Raises:
            WorkerLost: the card does not work.
        """
        pinning = pinning_of(device)
        if pinning is not None and pinning.pin(self._whole, self._path):
            self._pinning = pinning

    def close(self) -> None:
        """Forget the mapping, which ends with the last tensor that shows some of it.

        Raises:
            WorkerLost: as `pin`.
        """
        self.buffers = []
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning.release(self._whole)


def make_arenas(channel: Channel, plan: WeightPlan, sender: int) -> SharedArenas:
    """New arenas of a sender.

    Raises:
        StorageUnavailable: there is no room in shared memory.
    """
    size = channel.arenas * plan.arena_bytes
    path = _path(channel, sender)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)  # or a later write would end the process
        return SharedArenas(path, mmap.mmap(handle, size), plan.arena_bytes)
    except OSError as error:
        raise StorageUnavailable(
            f"{channel.arenas} arenas of {plan.arena_bytes >> 20} MiB for a weight update do not fit into "
            f"{channel.folder}: {error}; free shared memory there or lower sync.arena_mib"
        ) from error
    finally:
        os.close(handle)


def open_arenas(channel: Channel, plan: WeightPlan, sender: int) -> SharedArenas:
    """The arenas that a sender has made."""
    path = _path(channel, sender)
    handle = os.open(path, os.O_RDWR)
    try:
        return SharedArenas(path, mmap.mmap(handle, channel.arenas * plan.arena_bytes), plan.arena_bytes)
    finally:
        os.close(handle)


def _path(channel: Channel, sender: int) -> Path:
    return Path(channel.folder, f"arenas-{sender}")
