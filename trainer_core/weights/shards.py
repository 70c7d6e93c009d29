"""The tensor-parallel shards of everything in a bucket, exchanged at once."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer_core.weights.plan import ALIGNMENT


class Shards:
    """Shards that mappings ask for while the tensors of one bucket are converted."""

    def __init__(self) -> None:
        self._found: dict[int, list[torch.Tensor]] = {}

    def of(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The shards of all ranks, in their order, of one that was given to `exchange`."""
        return self._found[id(shard)]

    def exchange(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Gather the shards of tensors that all ranks of the group give in the same order. One collective."""
        octets = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        rooms = [-(-part.numel() // ALIGNMENT) * ALIGNMENT for part in octets]
        own = torch.empty(sum(rooms), dtype=torch.uint8, device=octets[0].device)  # (bytes,)
        places = [place[: part.numel()] for place, part in zip(own.split(rooms), octets, strict=True)]
        torch._foreach_copy_(places, octets)  # pyright: ignore[reportPrivateImportUsage]
        everyones = own.new_empty(group.size() * own.numel())
        dist.all_gather_into_tensor(everyones, own, group=group)
        for rank in everyones.view(group.size(), -1):  # (tp, bytes)
            for tensor, place in zip(tensors, rank.split(rooms), strict=True):
                shard = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                self._found.setdefault(id(tensor), []).append(shard)


def group_of(expert: bool) -> dist.ProcessGroup:
    """The ranks that divide the matrices of experts, or of everything else."""
    if expert:
        return cast(dist.ProcessGroup, parallel_state.get_expert_tensor_parallel_group())
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())
