"""The two ends of a weight update's channel in numpy: files that both map, and the real signals between them."""

import mmap
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from storage.errors import SyncMismatch
from trainer_core.weights.channel import Signals


def _arenas(channel, plan, sender):
    """The arenas of a sender, (arenas, arena_bytes) uint8; the first of both sides makes their file."""
    size = channel.arenas * plan.arena_bytes
    handle = os.open(Path(channel.folder, f"small-{sender}"), os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(handle, size)
    try:
        return np.frombuffer(mmap.mmap(handle, size), np.uint8).reshape(channel.arenas, plan.arena_bytes)
    finally:
        os.close(handle)


def tensors_of(plan, bucket):
    return [tensor for tensor in plan.tensors if tensor.bucket == bucket.number]


class SmallEnd:
    """One end of a channel."""

    def __init__(self, channel, plan):
        self._channel, self._plan = channel, plan
        self.signals = Signals(channel, plan)
        self._files = {}

    def octets(self, bucket, tensor):
        """Bytes of a tensor in its arena, (nbytes,) uint8."""
        if bucket.sender not in self._files:
            self._files[bucket.sender] = _arenas(self._channel, self._plan, bucket.sender)
        arena = self._files[bucket.sender][self.signals.place_of(bucket)]
        return arena[tensor.offset : tensor.offset + tensor.nbytes]

    def fail(self, reason):
        self.signals.fail(reason)


@contextmanager
def told(end):
    """Tell the other ends of a channel of an error, if there is one."""
    try:
        yield end
    except SyncMismatch as error:
        end.fail(str(error))
        raise
