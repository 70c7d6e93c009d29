"""Receiving the safetensors files that `TrainerProtocol.export` wrote."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from storage.errors import SyncMismatch
from trainer_core.weights.packing import packed, tensors_of
from trainer_core.weights.plan import Bucket, WeightPlan


class ExportedFiles:
    """Reads a bucket from each file of an export, which is complete."""

    def __init__(self, folder: str, plan: WeightPlan, files: Sequence[str], device: torch.device) -> None:
        self._folder, self._files, self._device = Path(folder), files, device
        self._planned = tensors_of(plan)

    def arena(self, bucket: Bucket) -> torch.Tensor:
        """See `Receiver.arena`.

        Raises:
            SyncMismatch: the file is not there, or holds other tensors than its records say.
        """
        path = self._folder / self._files[bucket.number]
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise SyncMismatch(f"the exported weights {path} cannot be read: {error}; export them again") from error
        return packed(bucket, self._planned[bucket.number], tensors).to(self._device)

    def release(self, bucket: Bucket) -> None:
        """See `Receiver.release`: files stay."""

    def fail(self, reason: str) -> None:
        """See `Receiver.fail`: nobody waits."""

    def close(self) -> None:
        """See `Receiver.close`: nothing is held."""
