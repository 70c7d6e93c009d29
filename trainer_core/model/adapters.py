"""LoRA: low-rank matrices that are trained beside frozen weights. A layer computes with the sum of both weights, not of
activations: with exactly the bits that engines are sent. A fused matrix has an adapter for each projection of Hugging
Face's model, so that another trainer reads them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion import param_mapping as maps
from megatron.bridge.models.conversion.model_bridge import (
    _megatron_local_name_to_global,  # pyright: ignore[reportPrivateUsage]
)
from megatron.bridge.models.conversion.utils import unwrap_model
from megatron.core import parallel_state
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from storage.digest import value_digest
from storage.errors import InputError
from trainer_core.lora import LoraConfig, factor_name, is_target

_Split = Literal["column", "row", "replicated"]
_DIRECT = (maps.AutoMapping, maps.ColumnParallelMapping, maps.RowParallelMapping, maps.ReplicatedMapping)
_CHILD = "adapter"  # megatron-bridge's conversions skip parameters below modules of this name


class Part(NamedTuple):
    """Rows of a fused matrix that are one projection of Hugging Face's model; with its adapter."""

    name: str  # Hugging Face name of the module
    first: int  # first row in each group of rows
    rows: int  # number of rows in each group

    @property
    def target(self) -> str:
        return self.name.rpartition(".")[2]


class Factor(NamedTuple):
    """A factor of an adapter, as peft knows it."""

    name: str  # peft's
    attribute: str  # name in the adapter
    axis: int | None  # axis along which tensor-parallel ranks divide it


@dataclass(frozen=True)
class _Place:
    """Division of a matrix between tensor-parallel ranks, and between projections."""

    split: _Split
    group: dist.ProcessGroup
    groups: int  # groups of rows on this rank; in each the projections follow each other
    parts: tuple[Part, ...]  # those with an adapter


def merged(weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor, scale: float) -> torch.Tensor:
    """`weight` (out, in) + scale * `b` (out, r) @ `a` (r, in), in the weight's type. Products are added in fp32 one by
    one, so that any rows and columns of the sum are the same bits wherever they are computed: on every layout and
    device, and at an export. A matrix product would add them in an order of its own."""
    if weight.is_cuda:
        from trainer_core.model import merge_kernel  # imports Triton

        return merge_kernel.merged(weight, b, a, scale)
    total = torch.zeros(weight.shape, device=weight.device)
    for column, row in zip((b.float() * scale).T, a.float(), strict=True):
        total += column[:, None] * row
    return total.add_(weight).to(weight.dtype)


class _Merged(torch.autograd.Function):
    """The weight with its adapters; a gradient that tensor-parallel ranks have in parts is summed over them."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, place: _Place, scale: float, *factors: torch.Tensor) -> torch.Tensor:
        ctx.place, ctx.scale = place, scale
        ctx.save_for_backward(*factors)
        found = weight.clone()
        grouped, before = (one.view(place.groups, -1, weight.shape[1]) for one in (found, weight))
        for part, b, a in zip(place.parts, factors[::2], factors[1::2], strict=True):
            rows = slice(part.first, part.first + part.rows)
            own = before[:, rows].reshape(-1, weight.shape[1])  # (groups * rows, in)
            grouped[:, rows] = merged(own, b, a, scale).view(place.groups, part.rows, -1)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        place, factors, found = ctx.place, ctx.saved_tensors, []
        whole = gradients[0].float().view(place.groups, -1, gradients[0].shape[1]) * ctx.scale
        for part, b, a in zip(place.parts, factors[::2], factors[1::2], strict=True):
            own = whole[:, part.first : part.first + part.rows].reshape(-1, whole.shape[2])  # (groups * rows, in)
            found += [own @ a.float().T, b.float().T @ own]
        if place.split != "replicated" and place.group.size() > 1:
            for gradient in found[place.split == "column" :: 2]:  # every rank has the factor that is not divided
                dist.all_reduce(gradient, group=place.group)
        return None, None, None, *(one.to(factor.dtype) for one, factor in zip(found, factors, strict=True))


class Adapter(torch.nn.Module):
    """The adapters of one linear layer: for each projection `b` (out, r), which begins as zeros, and `a` (r, in). Of a
    layer whose rows are divided, ranks have their rows of `b`; of one whose columns are, their columns of `a`."""

    def __init__(self, linear: torch.nn.Module, place: _Place, config: LoraConfig) -> None:
        super().__init__()
        self._place, self._scale, weight = place, config.alpha / config.rank, _weight(linear)
        for part in place.parts:
            shapes = (place.groups * part.rows, config.rank), (config.rank, weight.shape[1])
            for name, shape in zip(_names(part), shapes, strict=True):
                factor = torch.nn.Parameter(weight.new_zeros(shape))
                factor.sequence_parallel = vars(weight).get("sequence_parallel", False)  # pyright: ignore
                if name in self._axes():
                    factor.tensor_model_parallel, factor.partition_dim = True, self._axes()[name]  # pyright: ignore
                self.register_parameter(name, factor)
        linear.register_forward_pre_hook(partial(self._before, weight))
        linear.register_forward_hook(partial(self._after, weight), always_call=True)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The layer's weight with its adapters, (out, in)."""
        factors = (self._parameters[name] for part in self._place.parts for name in _names(part))
        return _Merged.apply(weight, self._place, self._scale, *factors)  # pyright: ignore[reportReturnType]

    def factors(self) -> list[Factor]:
        axes = self._axes()
        return [
            Factor(factor_name(part.name, kind), name, axes.get(name))
            for part in self._place.parts
            for kind, name in zip("BA", _names(part), strict=True)
        ]

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """Set the factors to those of a new adapter, the same in every layout: `a` by Kaiming's uniform distribution,
        as in peft, `b` to zero."""
        shares, share = (self._place.group.size(), self._place.group.rank()) if self._place.split == "row" else (1, 0)
        for part in self._place.parts:
            b, a = (self.get_parameter(name) for name in _names(part))
            columns = a.shape[1] * shares
            generator = torch.Generator().manual_seed(int(value_digest([seed, part.name])[:15], 16))
            drawn = torch.rand(a.shape[0], columns, generator=generator).mul_(2).sub_(1) / math.sqrt(columns)
            a.copy_(drawn.chunk(shares, dim=1)[share])
            b.zero_()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The factors as parts of whole tensors, for Megatron's plan of a state."""
        held: Any = dict(self._parameters)
        groups = {"tp_group": self._place.group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(held, prefix, self._axes(), sharded_offsets, **groups)

    def _axes(self) -> dict[str, int]:
        divided = {"column": 0, "row": 1}
        if self._place.split == "replicated":
            return {}
        axis = divided[self._place.split]
        return {_names(part)[axis]: axis for part in self._place.parts}

    def _before(self, weight: torch.nn.Parameter, linear: torch.nn.Module, _: object) -> None:
        linear._parameters["weight"] = self(weight)

    def _after(self, weight: torch.nn.Parameter, linear: torch.nn.Module, *_: object) -> None:
        linear._parameters["weight"] = weight


class _Adapters(torch.nn.ModuleDict):
    """The adapters of the linear layers of one module, by the names of the layers."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, one in self.items():
            assert isinstance(one, Adapter)
            found |= one.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return found


Adapters = Mapping[torch.nn.Module, Adapter]  # by their linear layers


def adapt(modules: Sequence[torch.nn.Module], registry: Any, provider: Any, config: LoraConfig) -> Adapters:
    """Freeze the model's weights and give the matrices that the configuration names their adapters. Raises InputError:
    a target is a matrix that cannot have an adapter."""
    for module in modules:
        module.requires_grad_(False)
    adapters = {}
    for parent, name, mapping in list(_linears(modules, registry, provider)):
        linear = parent.get_submodule(name)
        place = _place(linear, mapping, provider, config.targets)
        if place.parts:
            if _CHILD not in parent._modules:
                parent.add_module(_CHILD, _Adapters())
            adapters[linear] = Adapter(linear, place, config)
            parent.get_submodule(_CHILD).add_module(name, adapters[linear])
    if not adapters:
        raise InputError(f"train.lora.targets {list(config.targets)} names no matrix of a rank's layers: name others")
    return adapters


def _linears(
    modules: Sequence[torch.nn.Module], registry: Any, provider: Any
) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """Every matrix of a layer that the bridge knows: the module it belongs to, its name there, and the bridge's mapping
    of its weight."""
    chunks: Any = unwrap_model(list(modules))  # pyright: ignore[reportArgumentType]
    for stage, chunk in enumerate(chunks):
        for path, parent in chunk.named_modules():
            for name, linear in parent._modules.items():
                weight = linear._parameters.get("weight") if linear is not None and ".layers." in path else None
                if weight is not None and weight.ndim == 2:
                    whole = _megatron_local_name_to_global(chunks, provider, f"{path}.{name}.weight", stage)
                    if (mapping := registry.megatron_to_hf_lookup(whole)) is not None:
                        yield parent, name, mapping


def names_of(mapping: Any) -> tuple[str, ...]:
    """The Hugging Face names of what a mapping of the bridge makes, in the order of their rows."""
    return (mapping.hf_param,) if isinstance(mapping.hf_param, str) else tuple(mapping.hf_param.values())


def _place(linear: torch.nn.Module, mapping: Any, provider: Any, targets: Sequence[str]) -> _Place:
    names, rows = [name.removesuffix(".weight") for name in names_of(mapping)], len(_weight(linear))
    group: Any = parallel_state.get_tensor_model_parallel_group()
    groups, heads = 1, provider.kv_channels
    if type(mapping) is maps.QKVMapping:
        groups = rows // (heads * (provider.num_attention_heads // provider.num_query_groups + 2))
        sizes = [rows // groups - 2 * heads, heads, heads]
    else:
        sizes = [rows // len(names)] * len(names)
    firsts = [sum(sizes[:place]) for place in range(len(sizes))]
    parts = map(Part, names, firsts, sizes)
    chosen = tuple(part for part in parts if is_target(part.name, targets))
    if not chosen:
        return _Place("replicated", group, groups, ())
    if type(mapping) not in (*_DIRECT, maps.QKVMapping, maps.GatedMLPMapping) or ".experts." in chosen[0].name:
        raise InputError(
            f"train.lora.targets names {chosen[0].name}, a {'matrix of an expert' if mapping.is_expert else 'matrix'} "
            f"that {type(mapping).__name__} converts, and which cannot have an adapter: leave it out"
        )
    split: Any = maps.AutoMapping("", "")._detect_parallelism_type(linear)
    return _Place(split, group, groups, chosen)


def _weight(linear: torch.nn.Module) -> torch.nn.Parameter:
    return linear.get_parameter("weight")


def _names(part: Part) -> tuple[str, str]:
    return f"{part.target}_b", f"{part.target}_a"
