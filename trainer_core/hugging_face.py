"""The weights of a stored state under their Hugging Face names, in one process without process groups or a GPU.

megatron-bridge's registry says which names a stored tensor becomes. Its conversions gather from ranks, so what they do
to a whole tensor is done here. Tensors come one after another: none is held longer than the caller does."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion import param_mapping as maps
from safetensors import safe_open

from storage.errors import InputError, StorageError
from trainer_core.lora import factor_name
from trainer_core.model.adapters import merged, names_of
from trainer_core.platform.platform import quietly
from trainer_core.state.facts import OPTIMIZER_PREFIX
from trainer_core.state.files import Region, SavedState

_STACKED = re.compile(r"^(?P<before>.*\blayers)\.(?P<after>[^\d].*)$")
_EXPERTS = re.compile(r"^(?P<before>.*\.experts)\.experts\.(?P<after>.*)$")
_NUMBERED = re.compile(r"\.layers\.(\d+)\.")
_ADAPTER = ".adapter."
_IN_FP32 = ".router.expert_bias"
_OUTPUT, _CONSTANT = "output_layer.weight", "output_layer.bias"
_OF_THE_VOCABULARY = ("embedding.word_embeddings.weight", _OUTPUT)
_UNCHANGED = (
    maps.AutoMapping, maps.DirectMapping, maps.ColumnParallelMapping, maps.RowParallelMapping, maps.ReplicatedMapping,
)  # fmt: skip

Tensors = tuple[torch.Tensor, ...]
Exporting = Literal["policy", "rewards", "critic"]
"""Purpose of an export: to sample, to score whole responses by any program, or to begin another critic."""
_HEADS: Mapping[Exporting, Mapping[str, str]] = {
    "policy": {}, "rewards": {_OUTPUT: "score.weight"}, "critic": {_OUTPUT: "score.weight", _CONSTANT: "score.bias"},
}  # fmt: skip
"""Names of the output layer in a classifier. No pair of responses decides the constant of rewards, and transformers
does not know it; a critic has learnt it."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the state, or one layer or expert of a stacked one, and what it becomes."""

    stored: str  # its name in the state
    region: Region  # part of the tensor
    axes: int  # number of leading axes that count layers or experts
    names: tuple[str, ...]  # Hugging Face names
    shapes: tuple[tuple[int, ...], ...]  # their shapes
    dtype: torch.dtype
    split: Callable[[torch.Tensor], Tensors]  # makes the tensors of these names
    in_fp32: bool
    """True if it is fp32 in any precision: the trainer moves the biases of routers by steps that bf16 would lose."""
    place: tuple[int, int]  # its place in the order of the layers: embedding, layers, norm, output

    def tensors(self, state: SavedState) -> Tensors:
        whole = state.read(self.stored, self.region)
        return self.split(whole.reshape(whole.shape[self.axes :]))


@dataclass(frozen=True)
class Adapted:
    """A frozen tensor of the model that the run began with, and the factors that are added to it."""

    stored: str  # its name
    file: Path
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype  # that of the state
    factors: tuple[tuple[str, Region], ...]
    """`b` and `a`, each one layer of a stacked tensor of the state, by its name there; or none."""
    place: tuple[int, int]
    in_fp32: bool = False

    def matrices(self, state: SavedState) -> Tensors:
        return tuple(state.read(stored, region).reshape(region.shape[-2:]) for stored, region in self.factors)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.stored,)

    def tensors(self, state: SavedState) -> Tensors:
        with safe_open(self.file, framework="pt") as file:
            frozen = file.get_tensor(self.stored).to(self.dtype)
        if not self.factors or (lora := state.facts.lora) is None:
            return (frozen,)
        b, a = self.matrices(state)
        return (merged(frozen, b, a, lora.alpha / lora.rank),)


class StoredWeights:
    """All weights of a state, in the order of the layers."""

    def __init__(self, model_dir: Path, state: SavedState, vocab_size: int, kind: Exporting = "policy") -> None:
        """Plan the conversion; reads no tensor. `model_dir` has the model's config.json, and if the state holds
        adapters also the model's weights; the embedding has `vocab_size` rows without padding. A state of another
        `kind` than the policy's is that of a critic. Raises InputError: megatron-bridge does not know the architecture,
        or a tensor cannot be converted."""
        with quietly():
            bridge = AutoBridge.from_hf_pretrained(str(model_dir))
            self._config = bridge.to_megatron_provider(load_weights=False)
            self._registry = cast(Any, bridge)._model_bridge.mapping_registry()
        self._state, self._vocab_size, self._head = state, vocab_size, _HEADS[kind]
        tensors = [name for name in sorted(state.tensors) if not name.startswith(OPTIMIZER_PREFIX)]
        left_out = _CONSTANT if kind == "rewards" else None
        held = [name for name in tensors if _ADAPTER not in name and name != left_out]
        found: list[Entry | Adapted] = [self._entry(name, *layer) for name in held for layer in self._layers(name)]
        if state.facts.lora is not None:
            given = {name for entry in found for name in entry.names}
            found += [entry for entry in self._adapted(model_dir, tensors) if entry.stored not in given]
        self.entries = tuple(sorted(found, key=lambda entry: (entry.place, entry.stored)))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and contiguous tensor, in the order of `entries`."""
        for entry in self.entries:
            for name, tensor in zip(entry.names, entry.tensors(self._state), strict=True):
                yield name, tensor.contiguous()

    def factors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Factors of the adapters under the names that peft gives them, contiguous."""
        for entry in self.entries:
            if isinstance(entry, Adapted) and entry.factors:
                module = entry.stored.removesuffix(".weight")
                for kind, factor in zip("BA", entry.matrices(self._state), strict=True):
                    yield factor_name(module, kind), factor.contiguous()

    def _layers(self, stored: str) -> Iterator[tuple[str, Region, int]]:
        """Each layer or expert of a tensor: its name in the model, its region, and the number of axes that count."""
        size = self._state.tensors[stored].size
        axes = len(list(filter(None, (_STACKED.match(stored), _EXPERTS.match(stored)))))  # of layers, then of experts
        rest = size[axes:]
        for numbers in itertools.product(*map(range, size[:axes])):
            region = Region((*numbers, *(0 for _ in rest)), (*(1 for _ in numbers), *rest))
            yield _numbered(stored, numbers), region, axes

    def _adapted(self, model_dir: Path, stored: list[str]) -> Iterator[Adapted]:
        """Every tensor of the model's folder, with its factors."""
        factors: dict[str, tuple[tuple[str, Region], ...]] = {}
        for name in stored:  # sorted, so that `a` comes before `b`
            if _ADAPTER in name:
                for layer, region, _ in self._layers(name):
                    weight = self._weight(layer)
                    factors[weight] = ((name, region), *factors.get(weight, ()))
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self._state.facts.precision]
        for path in sorted(model_dir.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no dictionary
                    shape = tuple(file.get_slice(name).get_shape())
                    numbered = _NUMBERED.search(name)
                    place = (1, int(numbered.group(1))) if numbered else (2 * ("embed" not in name), 0)
                    yield Adapted(name, path, (shape,), dtype, factors.get(name, ()), place)

    def _weight(self, factor: str) -> str:
        """Hugging Face name of the matrix that an adapter's factor of a layer belongs to."""
        linear, _, own = factor.replace(_ADAPTER, ".").rpartition(".")
        mapping = self._registry.megatron_to_hf_lookup(f"{linear}.weight")
        target = f".{own[:-2]}.weight"  # without `_a` or `_b`
        return next(name for name in names_of(mapping) if name.endswith(target))

    def _entry(self, stored: str, name: str, region: Region, axes: int) -> Entry:
        names, split = self._conversion(stored, name)
        dtype = self._state.tensors[stored].dtype
        parts = split(torch.empty(region.shape[axes:], dtype=dtype, device="meta"))
        shapes = tuple(tuple(part.shape) for part in parts)
        in_fp32 = stored.endswith(_IN_FP32)
        return Entry(stored, region, axes, names, shapes, dtype, split, in_fp32, _place(name))

    def _conversion(self, stored: str, name: str) -> tuple[tuple[str, ...], Callable[[torch.Tensor], Tensors]]:
        """Hugging Face names of a tensor of the model, and what makes the tensors of these names."""
        if name in self._head:
            return (self._head[name],), lambda one: (one,)
        mapping = self._registry.megatron_to_hf_lookup(name)
        if mapping is None:
            fact = f"megatron-bridge does not know {name}, which is {stored} in the state"
            raise StorageError(f"{fact}: use the pinned versions")
        return names_of(mapping), self._split(mapping, name)

    def _split(self, mapping: Any, name: str) -> Callable[[torch.Tensor], Tensors]:
        if type(mapping) is maps.QKVMapping:
            config = self._config
            return lambda one: tuple((maps.split_qkv_biases if one.ndim == 1 else maps.split_qkv_weights)(config, one))
        if type(mapping) is maps.GatedMLPMapping:
            return lambda fused: tuple(fused.chunk(2))  # the gate's rows come first, whatever layout saved them
        if type(mapping) is maps.RMSNorm2ZeroCenteredRMSNormMapping:
            return lambda weight: (weight + 1,)
        if type(mapping) in _UNCHANGED and not vars(mapping).get("permute_dims"):
            rows = self._vocab_size if name in _OF_THE_VOCABULARY else None
            return lambda weight: (weight[:rows],)
        raise InputError(
            f"{name} is converted by megatron-bridge's {type(mapping).__name__}, which `ratchet export` does not know: "
            "export works for Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and DeepSeek-V3"
        )


def _numbered(stored: str, numbers: tuple[int, ...]) -> str:
    """The name in a model whose layers and experts are modules of their own."""
    rest = iter(numbers)
    name = _STACKED.sub(lambda found: f"{found['before']}.{next(rest)}.{found['after']}", stored)
    return _EXPERTS.sub(lambda found: f"{found['before']}.{found['after']}{next(rest)}", name)


def _place(name: str) -> tuple[int, int]:
    numbered = _NUMBERED.search(name)
    if numbered:
        return 1, int(numbered.group(1))
    return (0, 0) if name.startswith("embedding.") else (2, int(name == _OUTPUT))
