"""Elements of whole tensors that this rank holds, by names and positions that are the same under every layout.

The names are those of megatron-core's sharded state dict: one tensor for all layers, the layer is its first index; a
fused matrix is one tensor, whichever halves of it a rank holds. The distributed optimizer gives each data-parallel rank
a range of each parameter's elements, which is cut into boxes here."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from storage.errors import RatchetError
from trainer_core.model.model import Model
from trainer_core.model.optimizer import Optimizer
from trainer_core.platform.platform import quietly
from trainer_core.state.facts import OPTIMIZER_PREFIX
from trainer_core.state.files import Box, Region, Shard

_Leaf = ShardedTensor | ShardedTensorFactory | ShardedObject
_STATE = f"{OPTIMIZER_PREFIX}state"
_MAIN = "param"  # the optimizer's name of the main weights


@dataclass(frozen=True)
class LocalTensor:
    """A parameter or buffer of this rank's part of the model."""

    tensor: torch.Tensor  # the live parameter or buffer
    boxes: tuple[tuple[int, Box], ...]
    """The boxes that it consists of, each with the number of the element at which it begins."""
    speaks: bool  # True if this rank saves the elements, of the tensor- and pipeline-parallel ranks that have them
    first_replica: bool  # True if this is the first of the data-parallel ranks

    def shards(self, values: torch.Tensor, begin: int, prefix: str = "") -> Iterator[Shard]:
        """The elements `begin` and those that follow, whose values (n,) are given, as shards of `prefix` + name."""
        end = begin + values.numel()
        for offset, box in self.boxes:
            first, last = max(begin, offset), min(end, offset + box.elements)
            if first < last:
                named = replace(box, name=prefix + box.name)
                yield Shard(named, first - offset, values[first - begin : last - begin])


@quietly()
def local_tensors(model: Model, frozen: bool = False) -> list[LocalTensor]:
    """Everything of the model that is part of its state, on this rank; or else its `frozen` weights. Raises
    RatchetError if Megatron rearranges a tensor in a way that has no boxes, or a module has a state that is not in its
    tensors, such as the scales of fp8."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    content = {"dp_cp_group": group, "singleton_local_shards": False}
    states = [module.sharded_state_dict(metadata=content) for module in model.modules]  # pyright: ignore
    found = list(_leaves(states))
    for entry in found:
        if isinstance(entry, ShardedObject) and not _is_empty(entry.data):
            raise RatchetError(f"{entry.key} holds what is not in tensors and would be lost: use fp32 or bf16")
    tensors = [entry for entry in found if not isinstance(entry, ShardedObject)]
    return [_local(one, model.vocab_size) for one in tensors if model.is_frozen(cast(torch.Tensor, one.data)) == frozen]


def owned(tensors: list[LocalTensor], optimizer: Optimizer) -> Iterator[Shard]:
    """Every element of the train state that this rank owns: weights, buffers, main weights and moments. Main weights
    that are the weights themselves, as in fp32, are not repeated."""
    held = dict(_optimizer_states(optimizer))
    for local in tensors:
        if not local.speaks:
            continue
        live = local.tensor.detach().reshape(-1)
        if local.tensor in held:
            begin, states = held[local.tensor]
            count = states[_MAIN].numel()
            yield from local.shards(live[begin : begin + count], begin)
            yield from _optimizer_shards(local, begin, states)
        elif local.first_replica and not (isinstance(local.tensor, torch.nn.Parameter) and local.tensor.requires_grad):
            yield from local.shards(live, 0)


def optimizer_shards(tensors: list[LocalTensor], optimizer: Optimizer) -> Iterator[Shard]:
    """This rank's main weights and moments, also those that another rank saves."""
    held = dict(_optimizer_states(optimizer))
    for local in tensors:
        if local.tensor in held:
            yield from _optimizer_shards(local, *held[local.tensor])


def _optimizer_shards(local: LocalTensor, begin: int, states: dict[str, torch.Tensor]) -> Iterator[Shard]:
    weights = local.tensor.detach().view(-1)[begin:]
    for key, values in states.items():
        if key != _MAIN or values.data_ptr() != weights.data_ptr():
            yield from local.shards(values.detach().view(-1), begin, f"{_STATE}.{key}.")


def _optimizer_states(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, tuple[int, dict[str, torch.Tensor]]]]:
    """Each parameter of which this data-parallel rank has elements: the first of them, main weights and moments."""
    for part in optimizer.parts:
        for parameter in part.model_param_group_index_map:
            states = part._get_main_param_and_optimizer_states(parameter)
            wanted = {key: values for key, values in states.items() if key != "step"}
            yield parameter, (part._get_model_param_range_map(parameter)["param"].start, wanted)


def _leaves(state: object) -> Iterator[_Leaf]:
    if isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _leaves(value)
    elif isinstance(state, ShardedTensor | ShardedTensorFactory | ShardedObject):
        yield state


def _is_empty(value: object) -> bool:
    """True if the extra state of a module holds nothing, as that of Transformer Engine without fp8."""
    if isinstance(value, list | tuple):
        return all(map(_is_empty, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    return value is None or (isinstance(value, io.BytesIO) and not value.getvalue())


def _local(entry: ShardedTensor | ShardedTensorFactory, vocab_size: int) -> LocalTensor:
    tensor = cast(torch.Tensor, entry.data)
    parts = _leaves(entry.build()) if isinstance(entry, ShardedTensorFactory) else iter([entry])
    boxes = tuple((_offset(tensor, part), _box(part, vocab_size)) for part in cast(Iterator[ShardedTensor], parts))
    if sum(box.elements for _, box in boxes) != tensor.numel():
        raise RatchetError(f"{entry.key} is not made up of the boxes that Megatron gives for it: {boxes}")
    replica = cast(tuple[int, ...], entry.replica_id)
    return LocalTensor(tensor, boxes, speaks=not any(replica[:-1]), first_replica=not replica[-1])


def _offset(whole: torch.Tensor, part: ShardedTensor) -> int:
    """The element of the local tensor at which a part begins that is some of its rows."""
    values = cast(torch.Tensor, part.data)
    same = values.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    if not (same and values.is_contiguous() and whole.is_contiguous()):
        raise RatchetError(f"{part.key} is rearranged in the state, and only parts that are rows can be saved")
    return int(values.storage_offset() - whole.storage_offset())


def _box(part: ShardedTensor, vocab_size: int) -> Box:
    size, ahead = tuple(part.global_shape), part.prepend_axis_num
    padded = part.allow_shape_mismatch  # Megatron says so of every output layer, also one with fewer rows
    content = (*size[:ahead], min(vocab_size, size[ahead]), *size[ahead + 1 :]) if padded else size
    region = Region(tuple(part.global_offset), (*(1,) * ahead, *part.local_shape))
    return Box(part.key, size, content, region)
