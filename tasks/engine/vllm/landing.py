"""Map of the tensors of a Hugging Face checkpoint to the parameters of vLLM's model on this worker.

The table is read off the live modules and their own description of how they are split, not off vLLM's loaders: what the
loaders have done is checked against it. Of a module that is not listed here nothing is known; then there is no table.
Imports torch and vLLM."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from storage.errors import SyncMismatch
from trainer_core.weights.plan import PlannedTensor, WeightPlan

Box = tuple[tuple[int, int], ...]  # first and last + 1 entry of each dimension

Layers = Mapping[str, torch.nn.Module]  # all modules of a model by all of their names: see `named_layers`

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}  # layers that vLLM fuses into one, in the order of their rows


@dataclass(frozen=True)
class Place:
    """Place of one tensor of the checkpoint."""

    shape: tuple[int, ...]  # of the whole tensor
    of: Box  # the part of it that this worker holds; empty where another worker holds it, as with experts
    layer: str  # name of the module
    parameter: str  # name of the parameter in the module
    into: Box  # the part of the parameter that it fills

    @cached_property
    def held(self) -> bool:
        """True if this worker holds a part: none of other workers' experts, and no rows if it has padding alone."""
        return _volume(self.of) > 0

    @cached_property
    def whole(self) -> bool:
        """True if this worker holds all of it."""
        return all(part == (0, size) for part, size in zip(self.of, self.shape, strict=True))

    @cached_property
    def start(self) -> int | None:
        """Entries of the tensor before what this worker holds, if that is one piece of it."""
        cut = next((axis for axis, part in enumerate(self.of) if part != (0, self.shape[axis])), None)
        if cut is None:
            return 0
        rest = self.shape[cut + 1 :]
        whole = all(part == (0, size) for part, size in zip(self.of[cut + 1 :], rest, strict=True))
        return self.of[cut][0] * math.prod(rest) if whole and math.prod(self.shape[:cut]) == 1 else None


@dataclass
class Landing:
    """The table of one worker."""

    places: dict[str, Place] = field(default_factory=dict)  # by name of the tensor in the checkpoint
    shapes: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    """Of each parameter, by module and name."""
    types: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)
    """Of each parameter, and of those that belong to an earlier module."""
    padding: dict[tuple[str, str], int] = field(default_factory=dict)  # entries of a parameter that no checkpoint fills

    def check(self, plan: WeightPlan, also: Callable[[str], bool]) -> None:
        """Compare with a plan: it must fill every parameter, and hold nothing that has no place, unless `also` says
        that the engine has no use for it. Raises SyncMismatch, with the names."""
        for tensor in plan.tensors:
            place = self.places.get(tensor.name)
            if place is None and not also(tensor.name):
                raise SyncMismatch(
                    f"tensor {tensor.name} {list(tensor.shape)} of the weight update has no place in the engine's "
                    "model; trainer and engine must have the same architecture"
                )
            if place is not None and tensor.shape != place.shape:
                raise SyncMismatch(
                    f"tensor {tensor.name} of the weight update has shape {list(tensor.shape)}, the engine's model "
                    f"needs {list(place.shape)}; trainer and engine must have the same architecture"
                )
        self._check_filled(plan.tensors)

    def _check_filled(self, tensors: Sequence[PlannedTensor]) -> None:
        left = {key: _volume(tuple((0, n) for n in shape)) for key, shape in self.shapes.items()}
        for key, entries in self.padding.items():
            left[key] -= entries
        planned = {tensor.name for tensor in tensors}
        for name in planned & self.places.keys():
            place = self.places[name]
            if (place.layer, place.parameter) in left:
                left[place.layer, place.parameter] -= _volume(place.into)
        if any(left.values()):
            missing = sorted(
                name
                for name, place in self.places.items()
                if name not in planned and left.get((place.layer, place.parameter)) and place.held
            )
            raise SyncMismatch(
                f"the weight update does not fill {sum(map(bool, left.values()))} parameters of the engine's model: "
                f"{len(missing)} tensors {missing[:4]} are missing; trainer and engine must have the same architecture"
            )


def landing_of(layers: Layers) -> Landing | None:
    """The table of a model; None if it has a parameter in a module that is not known here."""
    table = Landing()
    owned: set[int] = set()
    for name, layer in layers.items():
        if not layer._parameters:
            continue
        own = {parameter: id(tensor) for parameter, tensor in own_parameters(layer).items()}
        shared = {parameter for parameter, identity in own.items() if identity in owned}
        owned |= set(own.values())
        if isinstance(layer, MLAAttention):
            continue  # its own are derived from its projection's
        loadable = loadable_parameters(layer)
        if not isinstance(layer, VocabParallelEmbedding):  # a tied output layer has a name of its own in checkpoints
            loadable = {parameter: tensor for parameter, tensor in loadable.items() if parameter not in shared}
        if not loadable:
            continue
        found = _parts(layer, name, loadable)
        if found is None:
            return None
        table.types |= {(name, parameter): tensor.dtype for parameter, tensor in loadable.items()}
        table.shapes |= {
            (name, parameter): tuple(tensor.shape) for parameter, tensor in loadable.items() if parameter not in shared
        }
        for part in found:
            key = (part.place.layer, part.place.parameter)
            if part.name is not None:
                table.places[part.name] = part.place
            elif key in table.shapes:
                table.padding[key] = table.padding.get(key, 0) + _volume(part.place.into)
    return table


def named_layers(model: torch.nn.Module) -> Layers:
    """All modules by all of their names: the output layer may be the embedding itself. torch's own way builds a
    generator for each level of each name."""
    found: dict[str, torch.nn.Module] = {}
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        found[path] = module
        ahead = f"{path}." if path else ""
        waiting += [(ahead + name, child) for name, child in reversed(module._modules.items()) if child is not None]
    return found


def own_parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters by their names in it."""
    return {name: tensor for name, tensor in layer._parameters.items() if tensor is not None}


def loaded_parameters(layers: Layers) -> Iterator[str]:
    """Names of all parameters that come from a checkpoint, the first name of each."""
    derived = [own_parameters(layer) for layer in layers.values() if isinstance(layer, MLAAttention)]
    passed = {id(tensor) for own in derived for tensor in own.values()}
    for path, layer in layers.items():
        for name, tensor in own_parameters(layer).items():
            if id(tensor) not in passed:
                passed.add(id(tensor))
                yield f"{path}.{name}" if path else name


def loadable_parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters before vLLM's post-processing, which may empty or repack them, or make scales of them."""
    recorded, _ = get_layerwise_info(layer).restore_metadata
    own = own_parameters(layer).items()
    return {name: recorded.get(name, tensor) for name, tensor in own if name in recorded or name != "weight_scale"}


@dataclass(frozen=True)
class Part:
    """A tensor of the checkpoint and its place, or entries of a parameter that have none."""

    name: str | None
    place: Place


def _parts(layer: torch.nn.Module, name: str, tensors: dict[str, torch.Tensor]) -> list[Part] | None:
    match layer:
        case RoutedExperts():
            return list(_experts(layer, name, tensors)) if tensors.keys() == {"w13_weight", "w2_weight"} else None
        case VocabParallelEmbedding():
            return list(_vocabulary(layer, name, tensors))
        case LinearBase():
            rows = _rows(layer, name)
            return None if rows is None else list(_linear(layer, name, tensors, rows))
        case RMSNorm() | torch.nn.LayerNorm():
            return [_whole(f"{name}.{parameter}", name, parameter, tensor) for parameter, tensor in tensors.items()]
    return None


@dataclass(frozen=True)
class Rows:
    """Rows that a linear layer takes from one tensor of the checkpoint."""

    source: str
    total: int  # rows of that tensor
    start: int  # first of them that this worker holds
    count: int  # number of rows


def _rows(layer: LinearBase, name: str) -> list[Rows] | None:
    """Rows of a linear layer's parameters, from the first on; None if they are not known."""
    rank, ranks = layer.tp_rank, layer.tp_size
    parent, _, own = name.rpartition(".")
    if type(layer) is QKVParallelLinear:
        query, key = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        value = layer.num_kv_heads * layer.v_head_size
        copies = layer.num_kv_head_replicas  # ranks that hold the same keys and values
        sizes = [(query, rank, ranks), (key, rank // copies, ranks // copies), (value, rank // copies, ranks // copies)]
    elif isinstance(layer, MergedColumnParallelLinear):
        sizes = [(size // ranks, rank, ranks) for size in layer.output_sizes]
    elif isinstance(layer, QKVParallelLinear):
        return None
    elif isinstance(layer, ColumnParallelLinear):
        return [Rows(name, layer.output_size, rank * layer.output_size_per_partition, layer.output_size_per_partition)]
    elif isinstance(layer, RowParallelLinear | ReplicatedLinear):
        return [Rows(name, layer.output_size, 0, layer.output_size)]
    else:
        return None
    sources = FUSED.get(own, ())
    if len(sources) != len(sizes):
        return None
    return [
        Rows(f"{parent}.{source}", size * parts, size * part, size)
        for source, (size, part, parts) in zip(sources, sizes, strict=True)
    ]


def _linear(layer: LinearBase, name: str, tensors: dict[str, torch.Tensor], rows: list[Rows]) -> Iterator[Part]:
    for parameter, tensor in tensors.items():
        if parameter not in ("weight", "bias"):  # a router's own, such as e_score_correction_bias
            yield _whole(f"{name}.{parameter}", name, parameter, tensor)
            continue
        columns, total = _columns(layer, tensor)
        first = 0
        for part in rows:
            place = Place(
                shape=(part.total, *total),
                of=((part.start, part.start + part.count), *columns),
                layer=name,
                parameter=parameter,
                into=((first, first + part.count), *((0, n) for n in tensor.shape[1:])),
            )
            yield Part(f"{part.source}.{parameter}", place)
            first += part.count


def _columns(layer: LinearBase, tensor: torch.Tensor) -> tuple[Box, tuple[int, ...]]:
    """Columns of the checkpoint's tensor that this worker holds, and how many it has; neither for a bias."""
    if tensor.ndim == 1:
        return (), ()
    if isinstance(layer, RowParallelLinear):
        size = layer.input_size_per_partition
        return ((layer.tp_rank * size, (layer.tp_rank + 1) * size),), (layer.input_size,)
    return ((0, layer.input_size),), (layer.input_size,)


def _vocabulary(layer: VocabParallelEmbedding, name: str, tensors: dict[str, torch.Tensor]) -> Iterator[Part]:
    shard = layer.shard_indices
    start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    for parameter, tensor in tensors.items():
        rest: Box = tuple((0, n) for n in tensor.shape[1:])
        shape = (layer.org_vocab_size, *tensor.shape[1:])
        yield Part(
            f"{name}.{parameter}", Place(shape, ((start, end), *rest), name, parameter, ((0, end - start), *rest))
        )
        yield Part(None, Place((), (), name, parameter, ((end - start, tensor.shape[0]), *rest)))


def _experts(layer: RoutedExperts, name: str, tensors: dict[str, torch.Tensor]) -> Iterator[Part]:
    """Gate and up projection of each expert lie below each other in `w13_weight`, the down projection in `w2_weight`.
    Sizes that vLLM rounds up leave the last entries unfilled."""
    count, twice, hidden = tensors["w13_weight"].shape
    held = twice // 2  # rows of the gate projection, with padding
    config, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    ranks = parallel.tp_size  # 1 where whole experts are dealt to workers
    rank = parallel.tp_rank if ranks > 1 else 0
    real, wide = config.intermediate_size // ranks, config.hidden_dim_unpadded or hidden
    prefix = name.removesuffix(".routed_experts")
    up: Box = ((rank * real, (rank + 1) * real), (0, wide))
    down: Box = ((0, wide), (rank * real, (rank + 1) * real))
    dealt = layer._buffers["_expert_map"]  # (experts,), -1 where another worker holds one; None if this one holds all
    locals_ = list(range(layer.global_num_experts)) if dealt is None else dealt.tolist()
    for expert, local in enumerate(locals_):
        here = local >= 0
        for source, first in ((layer.ckpt_gate_proj_name, 0), (layer.ckpt_up_proj_name, held)):
            into: Box = ((local, local + 1), (first, first + real), (0, wide)) if here else ()
            place = Place((real * ranks, wide), up if here else (), name, "w13_weight", into)
            yield Part(f"{prefix}.{expert}.{source}.weight", place)
        into = ((local, local + 1), (0, wide), (0, real)) if here else ()
        place = Place((wide, real * ranks), down if here else (), name, "w2_weight", into)
        yield Part(f"{prefix}.{expert}.{layer.ckpt_down_proj_name}.weight", place)
    unfilled = count * (twice * hidden - 2 * real * wide)
    yield Part(None, Place((), (), name, "w13_weight", ((0, unfilled),)))
    yield Part(None, Place((), (), name, "w2_weight", ((0, count * (held * hidden - real * wide)),)))


def _whole(source: str, layer: str, parameter: str, tensor: torch.Tensor) -> Part:
    box: Box = tuple((0, n) for n in tensor.shape)
    return Part(source, Place(tuple(tensor.shape), box, layer, parameter, box))


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, end) for start, end in box)]


def landed_part(parameter: torch.Tensor, place: Place) -> torch.Tensor:
    """View, in the tensor's shape, of the part of a tensor that a parameter of the table's shape holds, in one step."""
    strides = parameter.stride()
    first = sum(start * stride for (start, _), stride in zip(place.into, strides, strict=True))
    shape = place.shape if place.whole else [end - start for start, end in place.of]
    # an expert is one entry of the first dimension, which the tensor has not
    return parameter.as_strided(shape, strides[len(strides) - len(shape) :], parameter.storage_offset() + first)


def _volume(box: Box) -> int:
    return math.prod(end - start for start, end in box) if box else 0
