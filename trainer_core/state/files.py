"""The tensors of a state in torch's distributed-checkpoint format: files that are laid out once and filled in place.

Each rank writes what it owns into two files, that of the optimizer apart. Both are mapped into memory, so that saving
is one copy of each element, from the device straight to its place in the file. For a GPU the memory is pinned where
that is possible: in shared memory, not on a disk.
"""

import io
import itertools
import json
import logging
import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from storage.errors import RatchetError, StorageUnavailable, WorkerLost
from trainer_core.platform.pinning import Pinning
from trainer_core.state.boxes import Shard
from trainer_core.state.facts import OPTIMIZER_PREFIX
from trainer_core.state.pickles import COMMON_FILE, METADATA_FILE
from trainer_core.state.recording import frame
from trainer_core.state.saved import Region

_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_ALIGNED = 64  # bytes: every element type can be viewed there

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A box of a whole tensor in a file."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype
    region: Region
    file: str
    offset: int
    """Where the entry begins in the file."""
    length: int
    """Bytes of the entry, with its frame."""


class MappedFiles:
    """The files of one rank in a folder."""

    def __init__(self, directory: Path, rank: int, shards: Iterable[Shard], pinning: Pinning | None) -> None:
        """Lay the files out for the given shards; `fill` is called with the same ones, whatever their values are.

        Args:
            pinning: how memory is pinned for the device; None for a CPU.

        Raises:
            StorageUnavailable: there is no room for them.
            WorkerLost: as `Pinning.pin`.
        """
        self.directory = directory
        self.entries = list(_entries(shards, rank))
        self._pinning = pinning
        self._pinned: set[str] = set()
        self._maps: dict[str, torch.Tensor] = {}
        try:
            for name, own in _by_file(self.entries):
                self._maps[name] = self._mapped(name, list(own))
        except (StorageUnavailable, WorkerLost):
            self.close()
            raise
        if pinning is not None and len(self._pinned) < len(self._maps):
            logger.warning("memory of files in %s cannot be pinned: states are saved there at a lower speed", directory)
        self._places = [_place(self._maps[entry.file], entry) for entry in self.entries]

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        return list(self._maps)

    def fill(self, shards: Iterable[Shard]) -> None:
        """Copy the live elements into the files; they may change as soon as this returns.

        Raises:
            RatchetError: these are not the shards that the files were laid out for.
        """
        given = [(shard.box.name, region, values) for shard in shards for region, values in shard.regions()]
        if [one[:2] for one in given] != [(entry.name, entry.region) for entry in self.entries]:
            raise RatchetError(f"the state has other tensors than the files in {self.directory} were laid out for")
        for entry, place, (_, _, values) in zip(self.entries, self._places, given, strict=True):
            place.copy_(values.reshape(-1), non_blocking=entry.file in self._pinned)
        if self._pinning is not None:
            self._pinning.wait()

    def close(self) -> None:
        """Release pinned memory; the files remain."""
        while self._pinning is not None and self._pinned:
            self._pinning.release(self._maps[self._pinned.pop()])

    def _mapped(self, name: str, entries: list[Entry]) -> torch.Tensor:
        path = self.directory / name
        size = entries[-1].offset + entries[-1].length
        try:
            _reserve(path, size)
        except OSError as error:
            raise StorageUnavailable(f"{size} bytes for a train state cannot be reserved in {path}: {error}") from error
        mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        for entry in entries:
            around = frame(entry.dtype, entry.region.shape)
            _put(mapped, entry.offset, around.head)
            _put(mapped, entry.offset + entry.length - len(around.tail), around.tail)
        if self._pinning is not None and self._pinning.pin(mapped, path):
            self._pinned.add(name)
        return mapped


def describe(directory: Path, entries: Iterable[Entry]) -> list[str]:
    """Write what describes the files of all ranks; returns the names. Like torch's FileSystemWriter.finish."""
    ordered = sorted(entries, key=lambda entry: (entry.name, entry.region.start))
    tensors = {name: _whole(list(own)) for name, own in itertools.groupby(ordered, lambda entry: entry.name)}
    places = {
        MetadataIndex(entry.name, entry.region.start): _StorageInfo(entry.file, entry.offset, entry.length)
        for entry in ordered
    }
    metadata = Metadata({**tensors}, storage_data=places, version=CURRENT_DCP_VERSION)
    replace_file(directory / METADATA_FILE, pickle.dumps(metadata, protocol=4))
    # what megatron-core needs beside it to recognise the format, and for what is not a tensor: nothing
    others = {"metadata.json": json.dumps(_FORMAT).encode(), COMMON_FILE: _saved({})}
    for name, content in others.items():
        replace_file(directory / name, content)
    return [METADATA_FILE, *others]


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file: the one before may have become a part of a store, under another name."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _entries(shards: Iterable[Shard], rank: int) -> Iterator[Entry]:
    ends: dict[str, int] = {}
    for shard in shards:
        name = shard.box.name
        file = f"{OPTIMIZER_PREFIX if name.startswith(OPTIMIZER_PREFIX) else ''}__{rank}_0.distcp"
        for region, values in shard.regions():
            around = frame(values.dtype, region.shape)
            length = len(around.head) + values.nbytes + len(around.tail)
            offset = -(-ends.get(file, 0) // _ALIGNED) * _ALIGNED
            ends[file] = offset + length
            yield Entry(name, shard.box.content, values.dtype, region, file, offset, length)


def _by_file(entries: list[Entry]) -> Iterator[tuple[str, Iterator[Entry]]]:
    return itertools.groupby(sorted(entries, key=lambda entry: (entry.file, entry.offset)), lambda entry: entry.file)


def _reserve(path: Path, size: int) -> None:
    """A new file of which every byte has room: writing to a mapped file without it would end the process.

    Its second name keeps the store from taking the file itself as a part, which the next save would change.
    """
    second = path.with_name(f"{path.name}.mapped")
    for name in (path, second):
        name.unlink(missing_ok=True)
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    os.link(path, second)


def _put(mapped: torch.Tensor, offset: int, content: bytes) -> None:
    mapped[offset : offset + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _place(mapped: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The elements of an entry, one-dimensional."""
    around = frame(entry.dtype, entry.region.shape)
    begin, end = entry.offset + len(around.head), entry.offset + entry.length - len(around.tail)
    return mapped[begin:end].view(entry.dtype)


def _whole(entries: list[Entry]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(one.region.start), torch.Size(one.region.shape)) for one in entries]
    return TensorStorageMetadata(TensorProperties(entries[0].dtype), torch.Size(entries[0].size), chunks)
