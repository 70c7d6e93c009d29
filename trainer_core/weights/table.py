"""Tables of the weights that a trainer rank holds, for the other ranks. Imports without torch."""

import zlib
from collections.abc import Sequence

from pydantic import TypeAdapter

from trainer_core.frozen import Frozen


class Named(Frozen):
    """One Hugging Face tensor."""

    name: str
    """Hugging Face name."""
    dtype: str
    """Element type as torch spells it, without the prefix."""
    shape: tuple[int, ...]
    """Shape of the whole, unsharded tensor, without rows that only pad the vocabulary."""


class Row(Frozen):
    """One parameter or buffer of Megatron's."""

    name: str
    """Megatron's name, with the numbers of layers and experts that they have in the whole model."""
    expert: bool
    """True if it belongs to one expert, and is divided and replicated over the ranks as experts are."""
    tensors: tuple[Named, ...]
    """Hugging Face tensors that it becomes; empty if only the whole export knows (`trainer_core.weights.whole`)."""


class Place(Frozen):
    """Place of a rank in the layout, and the update that it was asked for."""

    rank: int
    """Global rank."""
    stage: int
    """Pipeline stage."""
    tensor: int
    """Tensor-parallel rank."""
    replica: int
    """Data-parallel rank, context-parallel ones included."""
    expert: int
    """Expert-parallel rank."""
    expert_tensor: int
    """Rank among those that divide an expert's matrices."""
    expert_replica: int
    """Rank among those that hold the same experts."""
    version: int
    """Weight version to be planned."""
    arena_bytes: int
    """Limit of a bucket."""
    config: str
    """Digest of what names and shapes depend on besides the model."""
    problem: str | None
    """The reason why this rank cannot send its weights; None if it can."""


Rows = tuple[Row, ...]
_ROWS: TypeAdapter[Rows] = TypeAdapter(Rows)


class Table(Frozen):
    """Table that one rank sends to the others."""

    place: Place
    """The rank."""
    rows: Rows
    """Its parameters and buffers."""


def encode(place: Place, rows: Sequence[Row]) -> bytes:
    """A table as it travels."""
    packed = zlib.compress(_ROWS.dump_json(tuple(rows), exclude_defaults=True), 1)
    return place.model_dump_json().encode() + b"\n" + packed


def decode(tables: Sequence[bytes], own: bytes = b"", rows: Rows = ()) -> list[Table]:
    """The tables of all ranks; replicas send equal bytes, which are read once.

    Args:
        own, rows: a table that need not be read, and what is in it.
    """
    known = {own.partition(b"\n")[2]: rows} if own else {}
    found: list[Table] = []
    for table in tables:
        head, _, packed = table.partition(b"\n")
        if packed not in known:
            known[packed] = _ROWS.validate_json(zlib.decompress(packed))
        found.append(Table.model_construct(place=Place.model_validate_json(head), rows=known[packed]))
    return found
