"""The files of a state: those of weights and of the optimizer for each rank, in safetensors format, filled in place.

A rank writes the boxes of whole tensors that it owns. Its files are laid out once and mapped into memory, so that a
save copies each element once, from the device to its place in the file. For a GPU the memory is page-locked where that
is possible: in shared memory, not on a disk.
"""

import json
import logging
import math
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from storage.errors import RatchetError, StorageUnavailable, WorkerLost
from trainer_core.platform.pinning import Pinning
from trainer_core.state.facts import FILES, OPTIMIZER_PREFIX, SHAPES, tensor_files
from trainer_core.state.saved import Box, Region, Shard, entry_key

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNED = 64  # bytes; a header is padded to a multiple of it

_FILE_BYTES = 1 << 30

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    box: Box  # all that its rank holds of the whole tensor
    dtype: torch.dtype
    region: Region
    file: str

    @property
    def key(self) -> str:
        return entry_key(self.box.name, self.region)


class MappedFiles:
    def __init__(
        self,
        directory: Path,
        rank: int,
        shards: Iterable[Shard],
        pinning: Pinning | None,
        file_bytes: int = _FILE_BYTES,
    ) -> None:
        """Lay the files out for the given shards; `fill` is called with the same ones, whatever their values are. A
        file that has reached `file_bytes` is followed by another, and the store takes several at a time. Raises
        StorageUnavailable if there is no room for them. Raises WorkerLost as `Pinning.pin`."""
        self.directory = directory
        self._entries = list(_entries(rank, shards, file_bytes))
        self.names = list(dict.fromkeys([*tensor_files(rank), *(entry.file for entry in self._entries)]))
        self._pinning = pinning
        self._pinned: dict[str, torch.Tensor] = {}
        places: dict[_Entry, torch.Tensor] = {}
        try:
            for name in self.names:
                places |= self._laid_out(name, [entry for entry in self._entries if entry.file == name])
        except (StorageUnavailable, WorkerLost):
            self.close()
            raise
        if pinning is not None and len(self._pinned) < len(self.names):
            logger.warning("memory of files in %s cannot be pinned: states are saved there at a lower speed", directory)
        self._places = [places[entry] for entry in self._entries]

    def fill(self, shards: Iterable[Shard]) -> None:
        """Copy the live elements into the files; they may change as soon as this returns. Raises RatchetError if the
        shards are not those that the files were laid out for."""
        given = [(shard.box.name, region, values) for shard in shards for region, values in shard.regions()]
        if [one[:2] for one in given] != [(entry.box.name, entry.region) for entry in self._entries]:
            raise RatchetError(f"the state has other tensors than the files in {self.directory} were laid out for")
        for entry, place, (_, _, values) in zip(self._entries, self._places, given, strict=True):
            place.copy_(values.reshape(-1), non_blocking=entry.file in self._pinned)
        if self._pinning is not None:
            self._pinning.wait()

    def close(self) -> None:
        while self._pinning is not None and self._pinned:
            self._pinning.release(self._pinned.popitem()[1])

    def _laid_out(self, name: str, entries: list[_Entry]) -> dict[_Entry, torch.Tensor]:
        """Write the header of a file and map it; the elements of each entry, one-dimensional."""
        optimizer = name.startswith(OPTIMIZER_PREFIX)
        count = sum(one.startswith(OPTIMIZER_PREFIX) == optimizer for one in self.names)
        header, bounds = _header(entries, count)
        path, size = self.directory / name, len(header) + max((end for _, end in bounds.values()), default=0)
        try:
            _reserve(path, size)
        except OSError as error:
            fact = (
                f"{size} bytes for a train state cannot be reserved in {path} on host {socket.gethostname()}: {error}"
            )
            raise StorageUnavailable(f"{fact}; free space there") from error
        mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        mapped[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        if self._pinning is not None and self._pinning.pin(mapped, path):
            self._pinned[name] = mapped
        elements = mapped[len(header) :]
        return {entry: elements[slice(*bounds[entry.key])].view(entry.dtype) for entry in entries}


def _entries(rank: int, shards: Iterable[Shard], file_bytes: int) -> Iterator[_Entry]:
    numbers, sizes = [0, 0], [0, 0]  # of the last file of weights, and of the optimizer
    for shard in shards:
        kind = shard.box.name.startswith(OPTIMIZER_PREFIX)
        for region, values in shard.regions():
            if sizes[kind] >= file_bytes:
                numbers[kind], sizes[kind] = numbers[kind] + 1, 0
            sizes[kind] += values.nbytes
            yield _Entry(shard.box, values.dtype, region, tensor_files(rank, numbers[kind])[kind])


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file: its predecessor may have become a part of a store, under another name."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _header(entries: list[_Entry], files: int) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """A safetensors header with its length, and the bounds of each entry's bytes behind it, by key. The format allows
    no gaps, so the widest elements come first: then all are aligned."""
    tensors, bounds, end = {}, {}, 0
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
        begin, end = end, end + math.prod(entry.region.shape) * entry.dtype.itemsize
        bounds[entry.key] = begin, end
        tensors[entry.key] = {
            "dtype": _TYPES[entry.dtype], "shape": entry.region.shape, "data_offsets": bounds[entry.key],
        }  # fmt: skip
    shapes = json.dumps({entry.box.name: entry.box.content for entry in entries})
    text = json.dumps({"__metadata__": {SHAPES: shapes, FILES: str(files)}, **tensors}).encode()
    padding = -(len(text) + 8) % _ALIGNED
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding, bounds


def _reserve(path: Path, size: int) -> None:
    """A new file of which every byte has room: writing to a mapped file without it would end the process. Its second
    name keeps the store from taking the file itself as a part, which the next save would change."""
    second = path.with_name(f"{path.name}.mapped")
    for name in (path, second):
        name.unlink(missing_ok=True)
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    os.link(path, second)
