"""The buckets of an update as safetensors files, in a local folder or an object store that both ends reach."""

import time
import uuid
from collections.abc import Callable
from typing import Any, cast

import fsspec.core
import torch
from safetensors.torch import load, save

from storage.errors import StorageUnavailable, SyncMismatch
from trainer_core.weights.channel import FAILED, UNKNOWN, Channel, fail
from trainer_core.weights.packing import packed, tensors_of, views
from trainer_core.weights.plan import Bucket, WeightPlan

_PAUSE_S = 0.05  # an object store is asked twenty times a second


class _BucketFiles:
    def __init__(self, channel: Channel, plan: WeightPlan, device: torch.device) -> None:
        fs, folder = fsspec.core.url_to_fs(channel.folder)
        self._fs, self._url = cast(Any, fs), channel.folder
        self._folder, self._deadline_s, self._device = str(folder), channel.deadline_s, device
        self._planned = tensors_of(plan)
        self._local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)

    def _check(self) -> None:
        if self._fs.exists(f"{self._folder}/{FAILED}"):
            raise SyncMismatch(self._fs.cat_file(f"{self._folder}/{FAILED}").decode() or UNKNOWN)

    def fail(self, reason: str) -> None:
        fail(self._folder if self._local else self._url, reason)

    def close(self) -> None:
        pass

    def _put(self, path: str, content: bytes) -> None:
        try:
            if self._local:
                written = f"{path}.{uuid.uuid4().hex}.part"  # both ends may fail at the same time
                self._fs.pipe_file(written, content)
                self._fs.mv(written, path)
            else:
                self._fs.pipe_file(path, content)
        except OSError as error:
            fact = f"weights cannot be written to {path}: {error}"
            raise StorageUnavailable(f"{fact}; free space there or choose another folder") from error

    def _path(self, bucket: Bucket) -> str:
        return f"{self._folder}/bucket-{bucket.number:05d}.safetensors"


class FilesSender(_BucketFiles):
    """Writes each bucket as a file. Nobody waits for the readers: they cannot be seen from here."""

    def __init__(self, channel: Channel, plan: WeightPlan, device: torch.device) -> None:
        super().__init__(channel, plan, device)
        self._arena = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device)  # (arena_bytes,)

    def arena(self, bucket: Bucket) -> torch.Tensor:
        self._check()
        return self._arena[: bucket.nbytes]

    def publish(self, bucket: Bucket, meanwhile: Callable[[], object] = lambda: None) -> None:
        found = views(self._planned[bucket.number], self._arena[: bucket.nbytes].cpu())
        self._put(self._path(bucket), save({name: tensor.contiguous() for name, tensor in found}))
        meanwhile()

    def finish(self) -> None:
        self._check()

    def close(self) -> None:
        self._arena = self._arena[:0]


class FilesReceiver(_BucketFiles):
    """Reads the file of each bucket once it is there. Files stay, for other engines."""

    def arena(self, bucket: Bucket) -> torch.Tensor:
        end = time.monotonic() + self._deadline_s
        self._check()
        while not self._fs.exists(self._path(bucket)):
            if time.monotonic() > end:
                raise SyncMismatch(
                    f"{self._path(bucket)} did not appear within {self._deadline_s:g} s: the trainer rank "
                    f"{bucket.sender} that writes it has died or hangs. Sync the weights again"
                )
            time.sleep(_PAUSE_S)
            self._check()
        tensors = load(self._fs.cat_file(self._path(bucket)))
        return packed(bucket, self._planned[bucket.number], tensors).to(self._device)

    def release(self, bucket: Bucket) -> None:
        pass
