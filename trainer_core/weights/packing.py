"""The tensors of a bucket as they lie in an arena."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch

from storage.errors import SyncMismatch
from trainer_core.weights.plan import Bucket, PlannedTensor, WeightPlan

WORD = 8  # bytes


def dtype_name(dtype: torch.dtype) -> str:
    """Name of an element type without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def element_type(name: str) -> torch.dtype:
    found = vars(torch)[name]
    if not isinstance(found, torch.dtype):
        raise SyncMismatch(f"{name!r} is not an element type")
    return found


def tensors_of(plan: WeightPlan) -> dict[int, list[PlannedTensor]]:
    found: dict[int, list[PlannedTensor]] = {bucket.number: [] for bucket in plan.buckets}
    for tensor in plan.tensors:
        found[tensor.bucket].append(tensor)
    return found


def views(tensors: Sequence[PlannedTensor], arena: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a bucket, as views of its arena, (bucket.nbytes,) uint8."""
    by_type: dict[str, list[PlannedTensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    found = {dtype: iter(_of_type(own, arena, element_type(dtype))) for dtype, own in by_type.items()}
    for tensor in tensors:
        yield tensor.name, next(found[tensor.dtype]).view(tensor.shape)


def _of_type(tensors: Sequence[PlannedTensor], arena: torch.Tensor, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """The elements of each, cut at once: the cost of a slice adds up over thousands of small tensors."""
    size = dtype.itemsize
    for tensor in tensors:
        if tensor.offset % size:
            raise SyncMismatch(f"tensor {tensor.name} does not begin at a whole {tensor.dtype} of its bucket")
    counts, end = _counts([(tensor.offset // size, math.prod(tensor.shape)) for tensor in tensors])
    elements = arena[: arena.numel() // size * size].view(dtype)
    return elements.split_with_sizes([*counts, elements.numel() - end])[1::2]


def _counts(places: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Sizes of the gap before each part of a row and of the part, given by its first element and size; and the end."""
    ends = [0, *(first + count for first, count in places)]
    gaps = ((first - end, count) for (first, count), end in zip(places, ends, strict=False))
    return list(chain.from_iterable(gaps)), ends[-1]


class Packing:
    """The tensors of one bucket on their way into its arena: a launch copies whole words, whatever their types. What is
    added before the arena is free costs nothing then."""

    def __init__(self, planned: Sequence[PlannedTensor]) -> None:
        self._planned = {tensor.name: tensor for tensor in planned}
        self._sources: dict[str, torch.Tensor] = {}
        whole = [tensor for tensor in planned if not tensor.nbytes % WORD]
        self._whole = [tensor.name for tensor in whole]
        self._counts, self._end = _counts([(tensor.offset // WORD, tensor.nbytes // WORD) for tensor in whole])

    def add(self, found: Mapping[str, torch.Tensor]) -> None:
        """Tensors by name; what is not planned is left out. Views of live weights are read by `write`. Raises
        SyncMismatch if one is not as it was planned."""
        for name, tensor in found.items():
            if (planned := self._planned.get(name)) is None:
                continue
            if tensor.dtype != element_type(planned.dtype) or tensor.shape != planned.shape:
                raise SyncMismatch(
                    f"{name} is {dtype_name(tensor.dtype)} {list(tensor.shape)} now, but was planned as "
                    f"{planned.dtype} {list(planned.shape)}: the model changed after the update was planned"
                )
            self._sources[name] = tensor if planned.nbytes % WORD else _words(tensor)

    def write(self, arena: torch.Tensor) -> None:
        """Write all tensors to their places in an arena, (bytes,) uint8. Raises SyncMismatch if one was not added."""
        if missing := [name for name in self._planned if name not in self._sources]:
            raise SyncMismatch(f"{missing[0]} was planned, but this rank has nothing that becomes it")
        if self._whole:
            words = arena[: arena.numel() // WORD * WORD].view(torch.int64)
            places = words.split_with_sizes([*self._counts, words.numel() - self._end])[1::2]
            torch._foreach_copy_(list(places), [self._sources[name] for name in self._whole])  # pyright: ignore[reportPrivateImportUsage]
        others = [tensor for tensor in self._planned.values() if tensor.nbytes % WORD]
        for name, place in views(others, arena):
            place.copy_(self._sources[name])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of whole words, (words,) int64: a view of it where it is in one piece."""
    flat = tensor.reshape(-1)
    aligned = flat if not flat.storage_offset() * flat.element_size() % WORD else flat.clone()
    return aligned.view(torch.int64)


def packed(bucket: Bucket, planned: Sequence[PlannedTensor], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A bucket of tensors on the host, (bucket.nbytes,) uint8. Raises SyncMismatch if others are planned."""
    arena = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    places = dict(views(planned, arena))
    missing, unknown = sorted(places.keys() - tensors.keys()), sorted(tensors.keys() - places.keys())
    if missing or unknown:
        fact = f"bucket {bucket.number} of a weight update: {missing or 'nothing'} missing"
        raise SyncMismatch(f"{fact}, {unknown or 'nothing'} was sent without being planned")
    for name, place in places.items():
        tensor = tensors[name]
        if (tensor.dtype, tensor.shape) != (place.dtype, place.shape):
            fact = f"tensor {name} was sent as {dtype_name(tensor.dtype)} {list(tensor.shape)}"
            raise SyncMismatch(f"{fact}, but is planned as {dtype_name(place.dtype)} {list(place.shape)}")
        place.copy_(tensor)
    return arena
