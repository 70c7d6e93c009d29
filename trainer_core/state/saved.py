"""Read a saved state in one process, without Megatron and without process groups: a region of a tensor at a time."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from storage.errors import StorageError
from trainer_core.state.facts import StateFacts, read_facts
from trainer_core.state.pickles import read_entry, read_metadata


@dataclass(frozen=True)
class Region:
    """A box in a tensor."""

    start: tuple[int, ...]
    """First index along each axis."""
    shape: tuple[int, ...]
    """Length along each axis."""

    def overlap(self, other: "Region") -> "Region | None":
        """The intersection, or None."""
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        shape = tuple(end - begin for begin, end in zip(start, ends, strict=True))
        return Region(start, shape) if all(length > 0 for length in shape) else None

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """The slices that cut this region out of a tensor that holds `outer`."""
        begins = [inner - origin for inner, origin in zip(self.start, outer.start, strict=True)]
        return tuple(slice(begin, begin + length) for begin, length in zip(begins, self.shape, strict=True))


class SavedState:
    """A state in a local folder: its tensors, and the objects beside them."""

    def __init__(self, folder: Path) -> None:
        """Read what the folder holds.

        Raises:
            StorageError: if that cannot be read.
            ForeignCode: if it names a class or function that states do not hold.
        """
        self.folder = folder
        self.facts: StateFacts = read_facts(str(folder))
        metadata = read_metadata(folder)
        self._entries = metadata.state_dict_metadata
        self._places = cast(dict[MetadataIndex, Any], metadata.storage_data)
        self._last: tuple[MetadataIndex, torch.Tensor] | None = None

    @property
    def names(self) -> set[str]:
        """Names of all tensors and objects."""
        return set(self._entries)

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Shape, type and chunks of a tensor; None if it is missing or is an object."""
        entry = self._entries.get(name)
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def chunks(self, name: str) -> list[Region]:
        """The boxes in which a tensor is stored, in the order of their indices."""
        stored = cast(TensorStorageMetadata, self._entries[name]).chunks
        return sorted((Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored), key=lambda box: box.start)

    def read(self, name: str, region: Region) -> torch.Tensor:
        """A region of a tensor, put together from the chunks that it touches.

        Raises:
            StorageError: there is no such tensor, or the chunks do not cover the region.
        """
        entry = self._entries.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise StorageError(f"the train state at {self.folder} has no tensor {name}: it is of another model")
        # allocated only when it is written to
        found, covered = torch.empty(region.shape, dtype=entry.properties.dtype), 0
        for chunk in self.chunks(name):
            if common := region.overlap(chunk):
                stored = self._chunk(MetadataIndex(name, chunk.start))
                found[common.within(region)] = stored[common.within(chunk)]
                covered += math.prod(common.shape)
        if covered != math.prod(region.shape):
            raise StorageError(
                f"the train state at {self.folder} has {covered} of the elements {region} of {name}, which has the "
                f"shape {tuple(entry.size)}: it is of another model, or not whole"
            )
        return found

    def read_object(self, name: str) -> Any:
        """An object that is not a tensor. Megatron stores a list of a rank's objects; a list of one is unwrapped."""
        stored = self._load(MetadataIndex(name))
        return stored[0] if isinstance(stored, list) and len(stored) == 1 else stored

    def _chunk(self, index: MetadataIndex) -> torch.Tensor:
        """A stored box; the last one is kept, because several regions of it are often read in turn."""
        if self._last is None or self._last[0] != index:
            self._last = index, self._load(index)
        return self._last[1]

    def _load(self, index: MetadataIndex) -> Any:
        if index not in self._places:
            raise StorageError(f"no readable train state at {self.folder}: {index} is in none of its files")
        return read_entry(self.folder, index, self._places[index])
