"""Receiving safetensors files, one per bucket, from a folder or an object store."""

import torch

from trainer_core.weights.bucket_files import BucketFiles
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Bucket, WeightPlan


class FilesReceiver:
    """Reads each bucket's file once it is there."""

    def __init__(self, channel: Channel, plan: WeightPlan, device: torch.device) -> None:
        self._files, self._device = BucketFiles(channel, plan), device

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Receiver.arena`.

        Raises:
            SyncMismatch: besides, if the file holds other tensors than planned.
        """
        self._files.check()
        return self._files.read(bucket, self._device)

    def release(self, bucket: Bucket) -> None:
        """See `Receiver.release`: the file stays, for other engines."""

    def fail(self, reason: str) -> None:
        """See `Receiver.fail`."""
        self._files.fail(reason)

    def close(self) -> None:
        """See `Receiver.close`: nothing is held."""
