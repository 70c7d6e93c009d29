"""Which weights are converted on the rank that holds them, and how the others are sent: by megatron-bridge's whole
export with fresh tasks, in which all ranks take part.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from megatron.bridge.models.conversion import param_mapping as maps
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
from megatron.bridge.models.llama.llama_bridge import LlamaBridge

from trainer_core.model.model import Model
from trainer_core.platform.platform import quietly
from trainer_core.weights.digest import dtype_name
from trainer_core.weights.table import Named

KNOWN: frozenset[type] = frozenset({
    maps.AutoMapping,
    maps.ColumnParallelMapping,
    maps.ConcatenatedQKVMapping,
    maps.DirectMapping,
    maps.GatedMLPMapping,
    maps.KVMapping,
    maps.QKVMapping,
    maps.QKVGMapping,
    maps.RMSNorm2ZeroCenteredRMSNormMapping,
    maps.ReplicatedMapping,
    maps.RowParallelMapping,
})  # fmt: skip
"""Mappings that make whole tensors of this rank's tensor and its tensor-parallel shards, and ask nobody else."""

_KNOWN_HOOKS = frozenset({
    MegatronModelBridge.maybe_modify_converted_hf_weight,
    # both pass on `inv_freq` of the checkpoint that the model came from
    DeepSeekV3Bridge.maybe_modify_converted_hf_weight,
    LlamaBridge.maybe_modify_converted_hf_weight,
})  # fmt: skip
_UNCHANGED = ("build_conversion_tasks", "stream_weights_megatron_to_hf")


def is_known(bridge: MegatronModelBridge[Any, Any, Any], mapping: object) -> bool:
    """Whether the mapping alone, with what the bridge does to its result, is all that an export would do."""
    kind = type(bridge)
    own = kind.maybe_modify_converted_hf_weight not in _KNOWN_HOOKS
    own |= any(vars(MegatronModelBridge)[name] is not _inherited(kind, name) for name in _UNCHANGED)
    return not own and type(mapping) in KNOWN


def exported(model: Model, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by Hugging Face name, on every rank. Collective, to its end.

    Args:
        model: holds them.
        names: Megatron's names of what is wanted, of all ranks.
    """
    bridge: Any = model.bridge
    chunks = list(model.chunks)
    with torch.no_grad(), quietly():
        tasks = bridge.get_conversion_tasks(chunks)  # new ones: kept ones remember shapes, types and owners
        chosen = [task for task in tasks if task is not None and task.global_param_name in names]
        for name, tensor in bridge.export_hf_weights(chunks, cpu=False, show_progress=False, conversion_tasks=chosen):
            yield name, tensor[: model.vocab_size] if name in model.vocabulary else tensor


def outlines(model: Model, names: Collection[str]) -> list[Named]:
    """Names, types and shapes of what `exported` gives, found by exporting once. Collective."""
    return [
        Named(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        for name, tensor in exported(model, names)
    ]


def _inherited(kind: type, name: str) -> object:
    return next(vars(parent)[name] for parent in kind.__mro__ if name in vars(parent))
