"""Plan of one weight update: every tensor by its Hugging Face name, its sender, its bucket and its place there.

A plan is made for each update from the live model, and forgotten with it. Imports without torch.
"""

import hashlib
import math
from collections.abc import Callable

from trainer_core.frozen import Frozen

ALIGNMENT = 256
"""Bytes; every tensor begins at a multiple of it in its bucket, so that kernels and copies are aligned."""

_SIZES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return _SIZES[dtype] * math.prod(shape)


class PlannedTensor(Frozen):
    """One tensor of an update."""

    name: str
    """Hugging Face name."""
    dtype: str
    """Element type as torch spells it, without the prefix: float32, bfloat16."""
    shape: tuple[int, ...]
    """Shape of the whole, unsharded tensor, without rows that only pad the vocabulary."""
    bucket: int
    """Number of the bucket that carries it."""
    offset: int
    """First byte in the bucket, a multiple of `ALIGNMENT`."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return size_of(self.dtype, self.shape)


class Bucket(Frozen):
    """Tensors that are moved at once, through one arena of their sender."""

    number: int
    """Place in the order of the plan. A sender sends its buckets, and receivers read all buckets, in this order."""
    sender: int
    """Trainer rank that converts and sends it."""
    nbytes: int
    """Size in bytes, at most `WeightPlan.arena_bytes`."""


class WeightPlan(Frozen):
    """One update; equal on every trainer rank and every engine worker, which its digest proves."""

    version: int
    """Weight version that the update leads to."""
    tensors: tuple[PlannedTensor, ...]
    """Tensors in the order of buckets, and in each by offset."""
    buckets: tuple[Bucket, ...]
    """Buckets by number."""
    arena_bytes: int
    """Size of every arena: that of the largest bucket. It is above the limit that was asked for if a tensor is, which
    then travels alone."""
    config: str = ""
    """Digest of what names and shapes depend on besides the model: the trainer's configuration."""

    def __reduce__(self) -> tuple[Callable[[str], "WeightPlan"], tuple[str]]:
        """Pickle as JSON, which takes a third of the time of an object for each tensor."""
        return WeightPlan.model_validate_json, (self.model_dump_json(),)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, without alignment."""
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_digest(plan: WeightPlan) -> str:
    """Digest of everything in a plan, 32 hexadecimal characters; trainer ranks and engine workers compute it alike."""
    return text_digest(plan.model_dump_json())


def text_digest(text: str) -> str:
    """`plan_digest` of a plan that is given as JSON."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
