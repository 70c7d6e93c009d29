"""The identity of a live train state: a digest of what it holds, equal under every layout and in every file format.

Each element is one 64-bit word: its bits, as a signed whole number. Words are mixed with their row-major positions in
the whole tensor and added modulo 2**64, so the sums of shards add up, wherever they are cut."""

import math

import torch
import torch.distributed as dist

from storage.digest import value_digest
from storage.errors import RatchetError
from trainer_core.state.facts import STATE_SCHEME, StateFacts, StateIdentity
from trainer_core.state.files import Box, Shard, bits
from trainer_core.weights.digest import mix
from trainer_core.weights.packing import dtype_name

_CHUNK = 1 << 22  # elements; bounds the temporary memory to a few times 32 MiB
_HALF = 16  # hexadecimal characters of a 64-bit word

_Kind = tuple[str, str, tuple[int, ...]]  # name, type and shape of a whole tensor


class Identifier:
    """Identifies the states of one trainer. From one to the next it keeps the list of all ranks' tensors."""

    def __init__(self) -> None:
        self._kinds: list[_Kind] | None = None

    def identity(
        self, shards: list[Shard], facts: StateFacts, generators: str, rank: int, device: torch.device
    ) -> StateIdentity:
        """Identify the state that the shards of all ranks make up. Collective. Raises RatchetError if the shards do not
        make up the whole tensors, or the padding of the vocabulary is not zero. `generators` is the digest of this
        rank's random generators; sums are exchanged on `device`."""
        mine = _own_words(generators, rank, dist.get_world_size())
        tensors, words = self.tensors(shards, mine, device)
        return StateIdentity(
            scheme=STATE_SCHEME,
            tensors=tensors,
            progress=value_digest(facts.progress()),
            generators=value_digest([facts.layout(), words]),
        )

    def tensors(self, shards: list[Shard], words: torch.Tensor, device: torch.device) -> tuple[str, list[str]]:
        """Digest of the tensors that the shards of all ranks make up, and the sums of their (n,) int64 `words`; as
        `identity`."""
        if self._kinds is None:
            own = {(shard.box.name, dtype_name(shard.values.dtype), shard.box.content) for shard in shards}
            everyones: list[set[_Kind]] = [set()] * dist.get_world_size()
            dist.all_gather_object(everyones, own)
            self._kinds = sorted(set().union(*everyones))
        # of each tensor the sum of its words, the number of elements, and of those in the padding that are not zero
        sums = torch.zeros((len(self._kinds), 3), dtype=torch.int64, device=device)
        rows = {name: row for row, (name, _, _) in enumerate(self._kinds)}
        for shard in shards:
            for begin in range(0, shard.values.numel(), _CHUNK):
                part = _partial(shard.box, shard.first + begin, shard.values[begin : begin + _CHUNK])
                sums[rows[shard.box.name]] += part
        table = torch.cat((sums.reshape(-1), words.to(device)))
        dist.all_reduce(table)  # wraps around like the sums themselves
        whole = table[: sums.numel()].view(-1, 3).tolist()
        _check(self._kinds, whole)
        rest = [f"{number % 2**64:016x}" for number in table[sums.numel() :].tolist()]
        tensors = [[*kind, f"{total % 2**64:016x}"] for kind, (total, _, _) in zip(self._kinds, whole, strict=True)]
        return value_digest(tensors), rest


def _partial(box: Box, first: int, values: torch.Tensor) -> torch.Tensor:
    positions = box.positions(first, values.numel(), values.device)
    mixed = mix(bits(values).to(torch.int64), positions)
    if box.size == box.content:
        return torch.stack((mixed.sum(), positions.new_full((), values.numel()), positions.new_zeros(())))
    inside = positions < math.prod(box.content)  # padding is the end of the first axis
    return torch.stack(((mixed * inside).sum(), inside.sum(), ((values != 0) & ~inside).sum()))


def _own_words(digest: str, rank: int, world_size: int) -> torch.Tensor:
    """A table of two words for each rank's digest, in which only this rank's are not zero, (2 * ranks,)."""
    table = torch.zeros((world_size, 2), dtype=torch.int64)
    for half in range(2):
        word = int(digest[half * _HALF : (half + 1) * _HALF], 16)
        table[rank, half] = word - 2**64 if word >= 2**63 else word
    return table.reshape(-1)


def _check(kinds: list[_Kind], whole: list[list[int]]) -> None:
    for (name, _, shape), (_, elements, padding) in zip(kinds, whole, strict=True):
        if elements != math.prod(shape):
            fact = f"the ranks own {elements} elements of {name}, whose shape is {shape}: the state is not saved"
            raise RatchetError(f"{fact}. Report this, with the model and the layout")
        if padding:
            raise RatchetError(
                f"{padding} elements of {name} belong to no token (the vocabulary is padded) and are not zero: the "
                "state is not saved. Something has trained them; report this, with the model and the configuration"
            )
