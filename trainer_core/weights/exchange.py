"""Exchanges between trainer ranks, without pickled objects: tables, failures, and shards of tensors."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from storage.errors import RatchetError, SyncMismatch
from trainer_core.model.mesh import Mesh
from trainer_core.weights.plan import ALIGNMENT

_BLOCK = 1 << 18  # bytes of one round; the table of a model with thousands of experts is some 100 kB
_HEAD = 8  # bytes of the length


def exchange(payload: bytes, mesh: Mesh) -> tuple[list[bytes], int]:
    """The payloads of all ranks, in their order, and the number of exchanges: 0 with one rank. Collective. One
    all-gather of blocks of equal size is enough for all but the largest payloads."""
    world = dist.get_world_size()
    if world == 1:
        return [payload], 0
    own = len(payload).to_bytes(_HEAD, "little") + payload
    found, rounds = [b""] * world, 0
    while rounds == 0 or any(len(part) < _HEAD + _length(part) for part in found):
        block = bytearray(own[rounds * _BLOCK : (rounds + 1) * _BLOCK].ljust(_BLOCK, b"\0"))
        sent = torch.frombuffer(block, dtype=torch.uint8).to(mesh.device)
        gathered = sent.new_empty(world * _BLOCK)
        dist.all_gather_into_tensor(gathered, sent)
        rows = gathered.cpu().view(world, _BLOCK)
        found = [part + row.numpy().tobytes() for part, row in zip(found, rows, strict=True)]
        rounds += 1
    return [part[_HEAD : _HEAD + _length(part)] for part in found], rounds


def _length(part: bytes) -> int:
    return int.from_bytes(part[:_HEAD], "little")


def agree(failure: RatchetError | None, mesh: Mesh) -> None:
    """Raise this rank's failure, or SyncMismatch if another rank has one. Collective, unless there is one rank."""
    failed = torch.tensor([failure is not None], dtype=torch.int32, device=mesh.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(failed)
    if failure is not None:
        raise failure
    if int(failed.item()):
        raise SyncMismatch("another trainer rank cannot send its weights, and says why; nothing was sent")


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
