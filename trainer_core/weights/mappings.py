"""megatron-bridge's mappings: those that are known, and the live settings and tensors that they read."""

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from megatron.bridge.models.conversion import param_mapping as maps
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
from megatron.bridge.models.llama.llama_bridge import LlamaBridge

from storage.digest import value_digest

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
"""Mappings that make whole tensors of the shards of the tensor-parallel ranks, and ask no other rank."""

_KNOWN_HOOKS = frozenset({
    MegatronModelBridge.maybe_modify_converted_hf_weight,
    # both pass on `inv_freq` of the checkpoint that the model came from
    DeepSeekV3Bridge.maybe_modify_converted_hf_weight,
    LlamaBridge.maybe_modify_converted_hf_weight,
})  # fmt: skip
_UNCHANGED = ("build_conversion_tasks", "stream_weights_megatron_to_hf")


def is_known(bridge: MegatronModelBridge[Any, Any, Any], mapping: object) -> bool:
    """True if the mapping alone, with what the bridge does to its result, is all that an export would do."""
    return type(mapping) in KNOWN and not _has_steps_of_its_own(type(bridge))


@lru_cache
def _has_steps_of_its_own(kind: type[MegatronModelBridge[Any, Any, Any]]) -> bool:
    own = kind.maybe_modify_converted_hf_weight not in _KNOWN_HOOKS
    return own or any(vars(MegatronModelBridge)[name] is not _inherited(kind, name) for name in _UNCHANGED)


def _inherited(kind: type, name: str) -> object:
    return next(vars(parent)[name] for parent in kind.__mro__ if name in vars(parent))


class Settings:
    """The model's configuration as mappings read it; without a `__dict__`, which they would copy each time."""

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._of, name)

    def digest(self) -> str:
        """Digest of all plain values, by which ranks compare theirs."""
        plain = {name: value for name, value in vars(self._of).items() if isinstance(value, str | int | float)}
        return value_digest({name: repr(value) for name, value in plain.items()})


def absent(name: str, tensor: torch.Tensor) -> str | None:
    """The reason why a tensor cannot be sent; None if it is in memory."""
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        return f"{name} is not in memory: it was moved away, and must be brought back before weights are sent"
    return None


@contextlib.contextmanager
def replaced(owner: object, **others: object) -> Iterator[None]:
    """Functions of a class or module are others while this lasts."""
    originals = {name: vars(owner)[name] for name in others}
    for name, other in others.items():
        setattr(owner, name, other)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)
