"""The files of a state, written and read: those of weights and of the optimizer for each rank, in safetensors format.

A rank writes the boxes of whole tensors that it owns. Its files are laid out once and mapped into memory, so that a
save copies each element once, from the device to its place in the file. For a GPU the memory is page-locked where that
is possible: in shared memory, not on a disk. Any process can read a state, without Megatron or process groups; nothing
in the files is executed."""

import json
import logging
import math
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from storage.errors import RatchetError, StorageError, StorageUnavailable, WorkerLost
from trainer_core.platform.pinning import Pinning
from trainer_core.state.facts import FILES, OPTIMIZER_PREFIX, SHAPES, StateFacts, read_facts, tensor_files

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_Bounds = tuple[tuple[int, ...], tuple[int, ...]]  # start and shape

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNED = 64  # bytes; a header is padded to a multiple of it

_FILE_BYTES = 1 << 30

logger = logging.getLogger(__name__)


def bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers of the same size."""
    return values.view(_BITS[values.element_size()])


@dataclass(frozen=True)
class Region:
    start: tuple[int, ...]  # first index along each axis
    shape: tuple[int, ...]  # length along each axis

    def overlap(self, other: "Region") -> "Region | None":
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        shape = tuple(end - begin for begin, end in zip(start, ends, strict=True))
        return Region(start, shape) if all(length > 0 for length in shape) else None

    def inside(self, size: tuple[int, ...]) -> bool:
        """True if the box lies in a tensor of that shape."""
        whole = Region((0,) * len(size), size)
        return len(self.start) == len(self.shape) == len(size) and self.overlap(whole) == self

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """The slices that cut this region out of a tensor that holds `outer`."""
        begins = [inner - origin for inner, origin in zip(self.start, outer.start, strict=True)]
        return tuple(slice(begin, begin + length) for begin, length in zip(begins, self.shape, strict=True))


@dataclass(frozen=True)
class Box:
    name: str  # name of the whole tensor
    size: tuple[int, ...]  # shape of the whole tensor, padding of the vocabulary included
    content: tuple[int, ...]  # shape of the whole tensor without that padding
    region: Region

    @property
    def elements(self) -> int:
        return math.prod(self.region.shape)

    def positions(self, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Row-major positions in the whole tensor of `count` elements of the box from `first` on, (count,) int64."""
        strides = [math.prod(self.size[axis + 1 :]) for axis in range(len(self.size))]
        axes = _merged(self.region.shape, strides)
        rest = torch.arange(first, first + count, dtype=torch.int64, device=device)
        found = torch.full_like(rest, sum(map(math.prod, zip(self.region.start, strides, strict=True))))
        for length, stride in reversed(axes[1:]):
            found += (rest % length) * stride
            rest = rest // length
        return found + rest * (axes[0][1] if axes else 1)


@dataclass(frozen=True)
class Shard:
    """Elements of a whole tensor that this rank alone owns."""

    box: Box  # box that contains them
    first: int  # number of the first element in the row-major order of the box; the others follow it
    values: torch.Tensor  # the live elements, one-dimensional

    @property
    def padded(self) -> bool:
        """True if some of the elements may be padding of the vocabulary."""
        return self.box.size != self.box.content

    def regions(self) -> Iterator[tuple[Region, torch.Tensor]]:
        """The boxes of the whole tensor that the elements make up, with their values in the shape of each. The padding
        of the vocabulary is left out: it depends on the layout, so it is not part of a state."""
        content, taken = Region((0,) * len(self.box.content), self.box.content), 0
        for start, shape in _cut(self.box.region.shape, self.first, self.first + self.values.numel()):
            region = Region(tuple(map(sum, zip(self.box.region.start, start, strict=True))), shape)
            values = self.values[taken : taken + math.prod(shape)].view(shape)
            taken += math.prod(shape)
            inside = region.overlap(content)
            if inside is not None:
                yield inside, values[inside.within(region)]


def _merged(shape: Iterable[int], strides: Iterable[int]) -> list[tuple[int, int]]:
    """Length and stride of as few axes as describe the same elements in the same order."""
    axes: list[tuple[int, int]] = []
    for length, stride in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == length * stride:
            axes[-1] = axes[-1][0] * length, stride
        else:
            axes.append((length, stride))
    return axes


def _cut(shape: tuple[int, ...], begin: int, end: int) -> Iterator[_Bounds]:
    """Start and shape of boxes that make up the elements from `begin` to `end` of a box, in row-major order."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row, inner = math.prod(shape[1:]), shape[1:]
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        yield from _within(last, _cut(inner, begin - last * row, end - last * row))
        return
    yield from _within(first - 1, _cut(inner, begin - (first - 1) * row, row) if begin < first * row else ())
    if first < last:
        yield (first, *(0,) * len(inner)), (last - first, *inner)
    yield from _within(last, _cut(inner, 0, end - last * row))


def _within(row: int, boxes: Iterable[_Bounds]) -> Iterator[_Bounds]:
    for start, shape in boxes:
        yield (row, *start), (1, *shape)


@dataclass
class SavedTensor:
    size: tuple[int, ...]
    dtype: torch.dtype
    boxes: dict[Region, Any] = field(default_factory=dict)  # the boxes in which it is stored, and the open file of each


class SavedState:
    def __init__(self, folder: Path, weights_alone: bool = False) -> None:
        """Read the headers of the files, with `weights_alone` without those of the optimizer, which may be missing.
        Raises StorageError if a file is missing or cannot be read."""
        self.folder = folder
        self.facts: StateFacts = read_facts(folder)
        self.tensors: dict[str, SavedTensor] = {}
        for rank in range(self.facts.parallel.world_size):
            for kind in range(1 if weights_alone else 2):
                number, count = 0, 1
                while number < count:
                    count = self._add(tensor_files(rank, number)[kind])
                    number += 1

    def chunks(self, name: str) -> list[Region]:
        """The boxes in which a tensor is stored, in the order of their indices."""
        return sorted(self.tensors[name].boxes, key=lambda box: box.start)

    def read(self, name: str, region: Region) -> torch.Tensor:
        """A region of a tensor, put together from the boxes that it touches; not to be written to. Raises StorageError
        if there is no such tensor, or its boxes do not cover the region."""
        if name not in self.tensors:
            raise StorageError(f"the train state at {self.folder} has no tensor {name}: it is of another model")
        tensor, covered = self.tensors[name], 0
        found = torch.empty(region.shape, dtype=tensor.dtype)  # takes memory only when it is written to
        for box, file in tensor.boxes.items():
            if common := region.overlap(box):
                values = file.get_tensor(entry_key(name, box))[common.within(box)]
                if common == region:
                    return values
                found[common.within(region)] = values
                covered += math.prod(common.shape)
        if covered != math.prod(region.shape):
            fact = f"the train state at {self.folder} has {covered} of the elements {region} of {name}"
            raise StorageError(f"{fact}, which has the shape {tensor.size}: it is of another model, or not whole")
        return found

    def _add(self, name: str) -> int:
        """Add the boxes of a file; returns how many files of its kind the rank has."""
        try:
            return self._boxes_of(safe_open(self.folder / name, framework="pt"))
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            fact = f"no readable train state at {self.folder}: {name}: {error}"
            raise StorageError(f"{fact}; load it again from the store") from error

    def _boxes_of(self, file: Any) -> int:
        shapes = json.loads(file.metadata()[SHAPES])
        for key in file.keys():  # noqa: SIM118 - no dictionary
            name, _, start = key.rpartition("@")
            values = file.get_tensor(key)
            box = Region(tuple(map(int, filter(None, start.split(",")))), tuple(values.shape))
            tensor = self.tensors.setdefault(name, SavedTensor(tuple(shapes[name]), values.dtype))
            if not box.inside(tensor.size) or (tuple(shapes[name]), values.dtype) != (tensor.size, tensor.dtype):
                fact = f"{key} is {values.dtype} {box.shape} of {shapes[name]}"
                raise ValueError(f"{fact}, which is not a box of the {tensor.dtype} {tensor.size} of the other files")
            tensor.boxes[box] = file
        return int(file.metadata()[FILES])


def entry_key(name: str, box: Region) -> str:
    """Name of a box in its file: that of the tensor, and the index at which the box begins."""
    return f"{name}@{','.join(map(str, box.start))}"


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
