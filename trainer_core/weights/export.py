"""Weights under Hugging Face names, written for an engine to read."""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from storage.errors import StorageUnavailable
from trainer_core.model.mesh import Mesh
from trainer_core.model.model import Model
from trainer_core.platform.platform import quietly
from trainer_core.weights.digest import dtype_name, tensor_digest
from trainer_core.weights.records import TensorRecord

_FILE_BYTES = 256 << 20
_LAYER = re.compile(r"^.*?\.layers\.\d+\.")


def export_weights(directory: str, model: Model, mesh: Mesh) -> list[TensorRecord]:
    """Rank 0 writes all weights as safetensors files and returns what it wrote; other ranks return []. Collective.

    Conversion tasks and the mappings' caches of shapes and owners are rebuilt on every call: a cached one may name
    a tensor that is no longer the live one. A layer is never divided between two files, so that what an engine
    fuses (q, k and v; gate and up) arrives together.

    Raises:
        StorageUnavailable: on rank 0, if the files cannot be written.
    """
    writer = _Writer(directory) if mesh.rank == 0 else None
    with torch.no_grad(), quietly():
        # no conversion_tasks given: AutoBridge makes a new bridge, new mappings and new tasks
        for name, tensor in model.bridge.export_hf_weights(list(model.chunks), cpu=False, show_progress=False):  # pyright: ignore
            if writer is not None:
                writer.add(name, tensor[: model.vocab_size] if name in model.vocabulary else tensor)
    return writer.finish() if writer is not None else []


class _Writer:
    """Collects tensors and writes them layer by layer.

    A failure to write is kept until `finish`, because the other ranks are in the middle of collectives by then.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._records: list[TensorRecord] = []
        self._pending: dict[str, torch.Tensor] = {}
        self._layer = ""
        self._files = 0
        self._failure: OSError | SafetensorError | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Accept a tensor under its Hugging Face name."""
        match = _LAYER.match(name)
        layer = match.group() if match else name
        if layer != self._layer and self._pending_bytes() >= _FILE_BYTES:
            self._flush()
        self._layer = layer
        digest = tensor_digest(tensor)
        shape = tuple(tensor.shape)
        record = TensorRecord(
            name=name, dtype=dtype_name(tensor.dtype), shape=shape, digest=digest, file=self._file_name()
        )
        self._records.append(record)
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def finish(self) -> list[TensorRecord]:
        """Write the rest; returns what was written, in order."""
        self._flush()
        if self._failure is not None:
            raise StorageUnavailable(
                f"weights cannot be written to {self._directory}: {self._failure}; free space there or choose another "
                f"folder for the weight sync"
            ) from self._failure
        return self._records

    def _file_name(self) -> str:
        return f"weights-{self._files:05d}.safetensors"

    def _pending_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._pending.values())

    def _flush(self) -> None:
        if self._failure is None and self._pending:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                save_file(self._pending, self._directory / self._file_name())
            except (OSError, SafetensorError) as error:
                self._failure = error
        self._files += 1
        self._pending = {}
