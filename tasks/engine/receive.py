"""Runs inside vLLM's worker: reads weights from safetensors files and verifies what arrived.

vLLM imports this module because it holds the class named by `worker_extension_cls`; that import also registers the
weight-transfer backend `ratchet` with vLLM's factory.
"""

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from storage.errors import SyncMismatch
from trainer_core.weights.digest import dtype_name, tensor_digest
from trainer_core.weights.records import TensorRecord

BACKEND = "ratchet"
_SHOWN = 4  # names spelled out in a message


@dataclasses.dataclass
class RatchetInit(WeightTransferInitInfo):
    """Sent once, after the engine has started."""

    model_dir: str = ""
    """Hugging Face directory the engine started from: every update must contain its tensors."""


@dataclasses.dataclass
class RatchetUpdate(WeightTransferUpdateInfo):
    """One file of an update."""

    path: str = ""
    """Local safetensors file."""
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Dumped `TensorRecord`s of the tensors that the file must hold."""
    final: bool = False
    """Whether this is the last file, with which the update must be complete."""


class _Loadable(Protocol):
    """What every vLLM model class offers besides `torch.nn.Module`."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """Load checkpoint tensors; returns the names of the parameters they went to."""
        ...


class RatchetTransfer(WeightTransferEngine[RatchetInit, RatchetUpdate]):
    """Loads verified files through vLLM's layer-wise reload."""

    init_info_cls = RatchetInit
    update_info_cls = RatchetUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: RatchetInit) -> None:
        """Learn which tensors a complete update has."""
        self._needed = checkpoint_shapes(Path(init_info.model_dir))
        # while an update is open, a tied output layer is no longer recognisable as the embedding
        self._parameters = {name for name, _ in self.model.named_parameters()}
        self._tied = list(tied_layers(self.model))
        self._received: dict[str, str] = {}
        self._loaded: set[str] = set()
        self._open = False

    def start_weight_update(self) -> None:
        """Open an update. One that failed before is closed first: its half-filled layers would count as filled."""
        if self._open:
            finalize_layerwise_reload(self.model, self.model_config)
        self._open = True
        self._received, self._loaded = {}, set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: RatchetUpdate) -> None:
        """Check each tensor of one file against its record, then load the file.

        Raises:
            SyncMismatch: the file, or with the final file the whole update, does not match the records.
        """
        records = {record.name: record for record in map(TensorRecord.model_validate, update_info.records)}
        if len(records) != len(update_info.records) or not self._received.keys().isdisjoint(records):
            raise SyncMismatch(f"{update_info.path}: a tensor was sent twice in one update")
        tensors = load_file(update_info.path, device=str(self.device))
        _same_names(tensors.keys(), records.keys(), f"tensors of {update_info.path}")
        for name, tensor in tensors.items():
            self._received[name] = _checked_digest(tensor, records[name])
            self._check_belongs(name, tuple(tensor.shape))
        self._loaded |= cast(_Loadable, self.model).load_weights(iter(tensors.items()))
        if update_info.final:
            _same_names(self._received.keys(), self._needed.keys(), "tensors of the weight update")
            loaded, held = ({_as_reported(name) for name in names} for names in (self._loaded, self._parameters))
            _same_names(loaded, held, "parameters that vLLM loaded")

    def _check_belongs(self, name: str, shape: tuple[int, ...]) -> None:
        expected = self._needed.get(name)
        if shape != expected:
            raise SyncMismatch(
                f"tensor {name} was sent with shape {list(shape)}, but the model that the engine started from has "
                f"{'no such tensor' if expected is None else list(expected)}; export the same architecture"
            )

    def finish_weight_update(self) -> None:
        """Let vLLM convert the loaded layers to the form its kernels use."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer, method in self._tied:
            method.process_weights_after_loading(layer)
        self._open = False

    def received_digests(self) -> dict[str, str]:
        """Digest of each tensor of the last update, as computed when it arrived."""
        return dict(self._received)

    def shutdown(self) -> None:
        """Nothing is held open between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Not used: the trainer writes the files."""
        raise NotImplementedError("the trainer exports safetensors files; see trainer_core")


class WorkerExtension:
    """Mixed into vLLM's worker class; reached through `collective_rpc`."""

    weight_transfer_engine: RatchetTransfer

    def received_digests(self) -> dict[str, str]:
        """Digest of each tensor of the last update, as computed when it arrived."""
        return self.weight_transfer_engine.received_digests()


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of all tensors in the safetensors files of a Hugging Face directory."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    return shapes


def tied_layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, QuantizeMethodBase]]:
    """The layers whose parameters belong to a layer before them, as the output layer's may to the embedding, each with
    the method that derives from them what its kernel uses: on CPU a packed copy.

    vLLM's reload processes only the first of both (limitation 2 of `vllm.model_executor.model_loader.reload`).
    """
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own and own <= seen and isinstance(layer, VocabParallelEmbedding):
            yield layer, layer.quant_method
        seen |= own


def _checked_digest(tensor: torch.Tensor, record: TensorRecord) -> str:
    digest = tensor_digest(tensor)
    arrived = (dtype_name(tensor.dtype), tuple(tensor.shape), digest)
    expected = (record.dtype, record.shape, record.digest)
    if arrived != expected:
        raise SyncMismatch(
            f"tensor {record.name} arrived as {_describe(*arrived)}; the trainer sent {_describe(*expected)}"
        )
    return digest


def _describe(dtype: str, shape: tuple[int, ...], digest: str) -> str:
    return f"{dtype} {list(shape)} with digest {digest}"


def _as_reported(parameter: str) -> str:
    """The name by which vLLM's loader of experts calls its parameters: without the module that holds them."""
    return parameter.replace(".experts.routed_experts.", ".experts.")


def _same_names(found: Collection[str], expected: Collection[str], what: str) -> None:
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise SyncMismatch(f"{what}: {_named(missing)} missing, {_named(unknown)} not expected")


def _named(names: list[str]) -> str:
    return f"{len(names)} {names[:_SHOWN]}" if names else "none"


def _register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, RatchetTransfer)


_register()
