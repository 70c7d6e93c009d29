"""The channel of one weight update, from trainer ranks to engine workers, and the progress of its ends: counters in a
file that all of them map. Imports without torch."""

import errno
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import fsspec.core
import numpy as np

from storage.errors import StorageUnavailable, SyncMismatch
from trainer_core.frozen import Frozen
from trainer_core.weights.plan import Bucket, WeightPlan

Transport = Literal["memory", "cuda", "collective", "files"]
"""`memory`: arenas in shared memory of the host. `cuda`: arenas on the senders' cards, opened by CUDA IPC.
`collective`: broadcasts of process groups of each sender and the receivers (NCCL on cards, gloo on CPU).
`files`: safetensors files in a folder or an object store that both sides reach."""
FAILED = "failed"  # name of the file, in the folder of a channel, that stops all its users; it contains the reason
UNKNOWN = "another process of the weight update failed, and its disk had no space left to say why"
"""Reason that an empty mark stands for."""
_WORD = 8  # bytes; one word is written and read as a whole
_FIRST_PAUSE_S, _LAST_PAUSE_S, _GROWTH = 50e-6, 1e-3, 1.05  # at the last pause an end looks a thousand times a second


class Channel(Frozen):
    """The channel of one update. The stage that drives the update makes it, and every process gets the same one."""

    transport: Transport  # the way in which bytes move
    folder: str
    """New, empty local folder in which both sides meet and count; for `files` the folder or URL of the files."""
    receivers: int  # engine workers that read, over all engines
    arenas: int = 2  # buffers of `WeightPlan.arena_bytes` of each sender
    deadline_s: float = 600.0  # seconds that one side waits for the other before it gives up


def fail(folder: str | Path, reason: str) -> None:
    """Stop all users of the channel in `folder`, a path or a URL; the first reason counts. On a full disk the mark is
    empty."""
    if "://" in str(folder):
        fs, place = fsspec.core.url_to_fs(f"{folder}/{FAILED}")
        if not fs.exists(place):
            fs.pipe_file(place, reason.encode() or UNKNOWN.encode())
        return
    place = Path(folder)
    own = place / f"{FAILED}-{os.getpid()}-{time.monotonic_ns()}"
    try:
        _write(own, reason)
        os.link(own, place / FAILED)  # appears whole, and only if there is none
    except FileExistsError:
        pass
    except FileNotFoundError:
        return  # the channel was removed: it has no users any more
    own.unlink(missing_ok=True)


def _write(path: Path, reason: str) -> None:
    try:
        path.write_text(reason, encoding="utf-8")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.truncate(path, 0)  # no half of a reason; an empty file needs no space


class Signals:
    """Counters of one update: buckets that each sender has published, and that each receiver has released of them. Each
    counter has one writer. A sender's buckets are counted in its own order. `met` says who has come to the group of a
    sender, (S, 1 + R): itself and the receivers."""

    def __init__(self, channel: Channel, plan: WeightPlan) -> None:
        self._folder, self._deadline_s, self._arenas = Path(channel.folder), channel.deadline_s, channel.arenas
        senders = sorted({bucket.sender for bucket in plan.buckets})
        self.place = {sender: place for place, sender in enumerate(senders)}
        self.turn: dict[int, int] = {}  # place of each bucket among those of its sender
        counts: Counter[int] = Counter()
        for bucket in plan.buckets:
            self.turn[bucket.number] = counts[bucket.sender]
            counts[bucket.sender] += 1
        width = 1 + channel.receivers
        memory = _shared(self._folder / "counters", len(senders) * 2 * width * _WORD)
        self.met, counters = np.frombuffer(memory, dtype=np.int64).reshape(2, len(senders), width)
        self.counted, self.released = counters[:, 0], counters[:, 1:]  # (S,), (S, R)

    def fail(self, reason: str) -> None:
        fail(self._folder, reason)

    def check(self) -> None:
        """Raise if a process has failed. Raises SyncMismatch with the reason that was given first."""
        try:
            reason = (self._folder / FAILED).read_text(encoding="utf-8") or UNKNOWN
        except FileNotFoundError:
            if self._folder.is_dir():
                return
            reason = f"the folder {self._folder} of the weight update was removed while it was under way"
        raise SyncMismatch(reason)

    def wait(self, reached: Callable[[], bool | np.bool_], what: str) -> None:
        """Return once `reached` is true. Raises SyncMismatch if a process has failed; past the deadline all fail."""
        pause, end = _FIRST_PAUSE_S, time.monotonic() + self._deadline_s
        while not reached():
            self.check()
            if time.monotonic() > end:
                reason = (
                    f"a weight update waited {self._deadline_s:g} s for {what}; the process that it waits for has "
                    "died or hangs. Sync the weights again"
                )
                self.fail(reason)
                raise SyncMismatch(reason)
            time.sleep(pause)
            pause = min(pause * _GROWTH, _LAST_PAUSE_S)

    def place_of(self, bucket: Bucket) -> int:
        """Number of the arena of its sender that carries a bucket."""
        return self.turn[bucket.number] % self._arenas

    def free(self, bucket: Bucket) -> None:
        """Wait until every receiver has released what the arena of a bucket held before."""
        earlier = self.turn[bucket.number] - self._arenas + 1
        self._until_released(bucket.sender, earlier, f"engines to read bucket {bucket.number} of the plan")

    def publish(self, bucket: Bucket) -> None:
        self.counted[self.place[bucket.sender]] = self.turn[bucket.number] + 1

    def read_by_all(self, sender: int) -> None:
        """Wait until every receiver has released everything that a sender sends."""
        self._until_released(sender, int(self.counted[self.place[sender]]), f"engines to read what rank {sender} sent")

    def published(self, bucket: Bucket) -> None:
        what = f"trainer rank {bucket.sender} to send bucket {bucket.number} of the plan"
        self.wait(lambda: self.is_published(bucket), what)

    def is_published(self, bucket: Bucket) -> bool:
        return bool(self.counted[self.place[bucket.sender]] > self.turn[bucket.number])

    def release(self, bucket: Bucket, receiver: int) -> None:
        self.released[self.place[bucket.sender], receiver] = self.turn[bucket.number] + 1

    def _until_released(self, sender: int, wanted: int, what: str) -> None:
        counters = self.released[self.place[sender]]  # (R,)
        self.wait(lambda: (counters >= wanted).all(), what)


def _shared(path: Path, size: int) -> mmap.mmap:
    """A file of that size, mapped as a whole; the first process makes it, of zeros."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError as error:
        raise SyncMismatch(f"the folder {path.parent} of the weight update is not there: sync again") from error
    try:
        os.posix_fallocate(handle, 0, size)  # or a later write would end the process
        return mmap.mmap(handle, size)
    except OSError as error:
        fact = f"the counters of a weight update do not fit into {path.parent}: {error}"
        raise StorageUnavailable(f"{fact}; free space there") from error
    finally:
        os.close(handle)
