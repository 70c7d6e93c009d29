"""Arenas in shared memory of the host: a file of each sender, which the receivers map too."""

import mmap
import os
from pathlib import Path
from typing import Any

import torch

from storage.errors import StorageUnavailable
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import WeightPlan


class SharedArenas:
    """The arenas of one sender, as seen from one end."""

    def __init__(self, file: mmap.mmap, arena_bytes: int) -> None:
        self._whole = torch.frombuffer(file, dtype=torch.uint8)  # keeps the mapping
        self.buffers = list(self._whole.split(arena_bytes))  # (arena_bytes,) each
        self._pinned = False

    def pin(self) -> None:
        """Let cards copy from and to the arenas at the speed of the link. Where that is refused they copy slowly."""
        code = _runtime().cudaHostRegister(self._whole.data_ptr(), self._whole.nbytes, 0)
        self._pinned = int(code) == 0

    def close(self) -> None:
        """Forget the mapping, which ends with the last tensor that shows some of it."""
        if self._pinned:
            _runtime().cudaHostUnregister(self._whole.data_ptr())
            self._pinned = False
        self.buffers = []


def make_arenas(channel: Channel, plan: WeightPlan, sender: int) -> SharedArenas:
    """New arenas of a sender.

    Raises:
        StorageUnavailable: there is no room in shared memory.
    """
    size = channel.arenas * plan.arena_bytes
    handle = os.open(_path(channel, sender), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)  # or a later write would end the process
        return SharedArenas(mmap.mmap(handle, size), plan.arena_bytes)
    except OSError as error:
        raise StorageUnavailable(
            f"{channel.arenas} arenas of {plan.arena_bytes >> 20} MiB for a weight update do not fit into "
            f"{channel.folder}: {error}; free shared memory there or lower sync.arena_mib"
        ) from error
    finally:
        os.close(handle)


def open_arenas(channel: Channel, plan: WeightPlan, sender: int) -> SharedArenas:
    """The arenas that a sender has made."""
    handle = os.open(_path(channel, sender), os.O_RDWR)
    try:
        return SharedArenas(mmap.mmap(handle, channel.arenas * plan.arena_bytes), plan.arena_bytes)
    finally:
        os.close(handle)


def _runtime() -> Any:
    """The CUDA runtime as torch has bound it."""
    return torch.cuda.cudart()


def _path(channel: Channel, sender: int) -> Path:
    return Path(channel.folder, f"arenas-{sender}")
