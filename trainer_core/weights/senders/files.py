"""Sending as safetensors files, one per bucket, into a folder or an object store: for engines that share no memory."""

import torch

from trainer_core.weights.bucket_files import BucketFiles
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Bucket, WeightPlan
from trainer_core.weights.senders.meanwhile import Meanwhile, idle


class FilesSender:
    """Writes each bucket as a file. Nobody waits for the readers: they cannot be seen from here."""

    def __init__(self, channel: Channel, plan: WeightPlan, device: torch.device) -> None:
        self._files = BucketFiles(channel, plan)
        self._arena = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device)  # (arena_bytes,)

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Sender.arena`."""
        self._files.check()
        return self._arena[: bucket.nbytes]

    def publish(self, bucket: Bucket, meanwhile: Meanwhile = idle) -> None:
        """See `Sender.publish`.

        Raises:
            StorageUnavailable: the file cannot be written.
        """
        self._files.write(bucket, self._arena[: bucket.nbytes].cpu())
        meanwhile()

    def finish(self) -> None:
        """See `Sender.finish`: what is written is all there is to wait for."""
        self._files.check()

    def fail(self, reason: str) -> None:
        """See `Sender.fail`."""
        self._files.fail(reason)

    def close(self) -> None:
        """See `Sender.close`."""
        self._arena = self._arena[:0]
