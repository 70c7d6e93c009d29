"""Which weights are converted on the rank that holds them; the others go through the whole export of megatron-bridge
(`trainer_core.weights.whole`).
"""

from functools import lru_cache
from typing import Any

from megatron.bridge.models.conversion import param_mapping as maps
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
from megatron.bridge.models.llama.llama_bridge import LlamaBridge

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
    return type(mapping) in KNOWN and not _has_steps_of_its_own(type(bridge))


@lru_cache
def _has_steps_of_its_own(kind: type[MegatronModelBridge[Any, Any, Any]]) -> bool:
    own = kind.maybe_modify_converted_hf_weight not in _KNOWN_HOOKS
    return own or any(vars(MegatronModelBridge)[name] is not _inherited(kind, name) for name in _UNCHANGED)


def _inherited(kind: type, name: str) -> object:
    return next(vars(parent)[name] for parent in kind.__mro__ if name in vars(parent))
