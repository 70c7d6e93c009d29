"""megatron-bridge's mappings: those that are known, the settings and tensors that they read, and their names.

Names of Megatron's tensors in the whole model and by Hugging Face are the bridge's own answers. Names that differ in
numbers alone, as those of layers and experts do, are asked for once. The answers are kept for one update."""

import contextlib
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from megatron.bridge.models.conversion import param_mapping as maps
from megatron.bridge.models.conversion.model_bridge import (
    MegatronModelBridge,
    _megatron_local_name_to_global,  # pyright: ignore[reportPrivateUsage]
)
from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
from megatron.bridge.models.llama.llama_bridge import LlamaBridge

from storage.digest import value_digest
from trainer_core.model.adapters import names_of

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
_LAYER = re.compile(r"^([^\d]+?\.layers\.)(\d+)(\..*)$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")
"""The text that matches the wildcard `*` of the bridge's patterns."""
_MARK = 7_000_001  # numbers from here on stand for those of names, and are found again in what the bridge makes of them
_TIED = "embedding.word_embeddings.weight"  # end of the name whose mapping the bridge asks for the name itself


def is_known(bridge: MegatronModelBridge[Any, Any, Any], mapping: object) -> bool:
    """True if the mapping alone, with what the bridge does to its result, is all that an export would do."""
    return type(mapping) in KNOWN and not _has_steps_of_its_own(type(bridge))


@lru_cache
def _has_steps_of_its_own(kind: type[MegatronModelBridge[Any, Any, Any]]) -> bool:
    own = kind.maybe_modify_converted_hf_weight not in _KNOWN_HOOKS
    inherited = [next(vars(parent)[name] for parent in kind.__mro__ if name in vars(parent)) for name in _UNCHANGED]
    return own or inherited != [vars(MegatronModelBridge)[name] for name in _UNCHANGED]


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
        plain = {name: repr(value) for name, value in vars(self._of).items() if isinstance(value, str | int | float)}
        return value_digest(plain)


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


class Known(NamedTuple):
    whole: str  # the name with the numbers that layers and experts have in the whole model
    kind: Hashable  # key that is the same for names that differ in numbers alone
    mapping: Any  # the bridge's mapping of the first name of the kind; None if it has none
    names: tuple[str, ...]  # Hugging Face names


@dataclass(frozen=True)
class _Rest:
    """The rest of a name behind the number of a layer, the same in many layers."""

    whole: str  # the rest with the numbers that experts have in the whole model
    kind: str
    mapping: Any
    templates: tuple[str, ...]  # Hugging Face's names, with a place for the number of the layer


class Names:
    def __init__(self, registry: Any, chunks: list[Any], config: Any) -> None:
        """`registry` holds the mappings; the bridge renumbers layers and experts by the model's chunks and config."""
        self._registry, self._chunks, self._config = registry, chunks, config
        numbered = [mapping.megatron_param for mapping in registry.mappings if _NUMBER.search(mapping.megatron_param)]
        # kinds of which some names have a pattern of their own
        self._apart = {_NUMBER.sub("#", pattern.replace("*", "0")) for pattern in numbered}
        self._uniform = not any("**" in pattern for pattern in numbered)
        self._kinds: dict[str, tuple[Any, tuple[str, ...] | None]] = {}
        self._layers: dict[tuple[int, str, str], str] = {}
        self._rests: dict[tuple[str, str], _Rest] = {}

    def known(self, stage: int, name: str) -> Known:
        split = _LAYER.match(name)
        if split is None:
            return self._asked(self._renumbered(stage, name))
        head, number, rest = split.groups()
        if (stage, head, number) not in self._layers:  # the bridge renumbers a layer by what stands before the rest
            whole = self._renumbered(stage, f"{head}{number}.#")
            self._layers[stage, head, number] = whole.removeprefix(head).removesuffix(".#")
        layer, seen = self._layers[stage, head, number], self._rests.get((head, rest))
        if seen is not None:
            names = tuple(template.format(layer) for template in seen.templates)
            return Known(f"{head}{layer}{seen.whole}", seen.kind, seen.mapping, names)
        found = self._asked(self._renumbered(stage, name))
        self._note(head, layer, rest, found)
        return found

    def _note(self, head: str, layer: str, rest: str, found: Known) -> None:
        """Know the rest of a name in other layers too, unless the bridge may say something else of it there."""
        whole = found.whole.removeprefix(f"{head}{layer}")
        _, templates = self._kinds.get(str(found.kind), (None, None))
        if templates is not None and "layers." not in rest and whole != found.whole:
            filled = tuple(template.format("{0}", *_NUMBER.findall(whole)) for template in templates)
            self._rests[head, rest] = _Rest(whole, str(found.kind), found.mapping, filled)

    def _renumbered(self, stage: int, name: str) -> str:
        return _megatron_local_name_to_global(self._chunks, self._config, name, stage)

    def _asked(self, whole: str) -> Known:
        kind, numbers = _NUMBER.sub("#", whole), _NUMBER.findall(whole)
        mapping, templates = self._kinds.get(kind, (None, None))
        if templates is not None:
            return Known(whole, kind, mapping, tuple(template.format(*numbers) for template in templates))
        mapping = self._registry.megatron_to_hf_lookup(whole)
        if mapping is None:
            return Known(whole, whole, None, ())
        if kind not in self._kinds:
            self._kinds[kind] = mapping, self._templates(kind, whole, mapping)
        uniform = self._kinds[kind][1] is not None
        return Known(whole, kind if uniform else whole, mapping, names_of(mapping))

    def _templates(self, kind: str, whole: str, mapping: Any) -> tuple[str, ...] | None:
        """Hugging Face names of a kind, with places for numbers; None if the bridge must be asked for each."""
        if not self._uniform or kind in self._apart or whole.endswith(_TIED):
            return None
        marks = [str(_MARK + place) for place in range(kind.count("#"))]
        asked = self._registry.megatron_to_hf_lookup(kind.replace("#", "{}").format(*marks))
        if type(asked) is not type(mapping):
            return None
        templates = names_of(asked)
        for place, mark in enumerate(marks):
            templates = tuple(name.replace(mark, f"{{{place}}}") for name in templates)
        numbers = _NUMBER.findall(whole)
        return templates if tuple(one.format(*numbers) for one in templates) == names_of(mapping) else None
