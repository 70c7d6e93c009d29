"""Safetensors files of a known size, written tensor by tensor.

Format: https://huggingface.co/docs/safetensors: the length of a JSON header as 8 bytes, the header, then the tensors.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tasks.export.target import Target

INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8
_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name in safetensors: F32, BF16."""

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def planned_shards(tensors: Iterable[Planned], limit: int) -> dict[str, list[Planned]]:
    """Tensors of each file, in order; a file holds at most `limit` bytes of them, or a single tensor."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{at:05d}-of-{len(shards):05d}.safetensors": shard for at, shard in enumerate(shards, 1)}


def header(shard: Sequence[Planned]) -> bytes:
    """Bytes of a file before its tensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        ends = [offset, offset + tensor.bytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": ends}
        offset += tensor.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_shards(
    target: Target, shards: dict[str, list[Planned]], tensors: Iterator[tuple[str, memoryview]]
) -> dict[str, object]:
    """Write all files, taking the bytes of one tensor after another in the planned order; returns the index."""
    for file_name, shard in shards.items():
        with target.file(file_name) as file:
            file.write(header(shard))
            for planned in shard:
                name, data = next(tensors)
                if (name, data.nbytes) != (planned.name, planned.bytes):
                    raise ValueError(f"{planned} was planned, but {name} with {data.nbytes} bytes came")
                file.write(data)
    total = sum(tensor.bytes for shard in shards.values() for tensor in shard)
    places = {tensor.name: file_name for file_name, shard in shards.items() for tensor in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
