"""Plan of one weight update, which every rank makes of the tables of all ranks: every tensor by its Hugging Face name,
its sender, its bucket and its place there. Made for each update from the live model, and forgotten with it. Imports
without torch."""

import hashlib
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter

from storage.errors import SyncMismatch
from trainer_core.frozen import Frozen

Form = Literal["whole", "base", "adapter"]
"""Weights that an update brings: `whole` all of them, with their adapters added; `base` the frozen ones as the model
came; `adapter` the factors of adapters under peft's names."""

ALIGNMENT = 256  # bytes; every tensor begins at a multiple of it in its bucket, so that kernels and copies are aligned
_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_LAYER = re.compile(r"^(?P<part>\w+)\.layers\.(?P<layer>\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.|linear_fc\d\.(?:weight|bias)(\d+)$)")
_PARTS = ("embedding", "decoder", "", "mtp")
"""The order in which a model is sent; what belongs to no layer (final norm, output layer) comes after the decoder."""


class Named(Frozen):
    name: str  # Hugging Face name
    dtype: str  # element type as torch spells it, without the prefix: float32, bfloat16
    shape: tuple[int, ...]  # shape of the whole, unsharded tensor, without rows that only pad the vocabulary

    @property
    def nbytes(self) -> int:
        return _SIZES[self.dtype] * math.prod(self.shape)


class PlannedTensor(Named):
    bucket: int  # number of the bucket that carries it
    offset: int  # first byte in the bucket, a multiple of `ALIGNMENT`


class Bucket(Frozen):
    """Tensors that are moved at once, through one arena of their sender."""

    number: int
    """Place in the order of the plan. A sender sends its buckets, and receivers read all buckets, in this order."""
    sender: int  # trainer rank that converts and sends it
    nbytes: int  # size in bytes, at most `WeightPlan.arena_bytes`


class WeightPlan(Frozen):
    """One update; equal on every trainer rank and every engine worker, which its digest proves."""

    version: int  # weight version that the update leads to
    tensors: tuple[PlannedTensor, ...]  # tensors in the order of buckets, and in each by offset
    buckets: tuple[Bucket, ...]  # buckets by number
    arena_bytes: int
    """Size of every arena: that of the largest bucket, above the limit only if a tensor is, which travels alone."""
    config: str = ""  # digest of what names and shapes depend on besides the model: the trainer's configuration
    form: Form = "whole"  # weights that the tensors are
    base: str = ""  # digest of the frozen weights, which these tensors are or belong to; empty of whole ones

    def __reduce__(self) -> tuple[Callable[[str], "WeightPlan"], tuple[str]]:
        """Pickle as JSON, which takes a third of the time of an object for each tensor."""
        return WeightPlan.model_validate_json, (self.model_dump_json(),)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def text_digest(text: str) -> str:
    """Digest of a plan as JSON, 32 hexadecimal characters; trainer ranks and engine workers compute it alike."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Row(Frozen):
    name: str  # Megatron's name, with the numbers of layers and experts that they have in the whole model
    expert: bool  # True if it belongs to one expert, and is divided and replicated over the ranks as experts are
    tensors: tuple[Named, ...]
    """Hugging Face tensors that it becomes; empty if only the whole export knows (`trainer_core.weights.whole`)."""


class Place(Frozen):
    """Place of a rank in the layout, and the update that it was asked for."""

    rank: int  # global rank
    stage: int  # pipeline stage
    tensor: int  # tensor-parallel rank
    replica: int  # data-parallel rank, context-parallel ones included
    expert: int  # expert-parallel rank
    expert_tensor: int  # rank among those that divide an expert's matrices
    expert_replica: int  # rank among those that hold the same experts
    version: int  # weight version to be planned
    arena_bytes: int  # limit of a bucket
    config: str  # digest of what names and shapes depend on besides the model
    problem: str | None  # the reason why this rank cannot send its weights; None if it can


Rows = tuple[Row, ...]
_ROWS: TypeAdapter[Rows] = TypeAdapter(Rows)


class Table(Frozen):
    """Table that one rank sends to the others: its place, its parameters and buffers."""

    place: Place
    rows: Rows

    def of(self, expert: bool) -> list[Row]:
        return [row for row in self.rows if row.expert == expert]


def encode(place: Place, rows: Sequence[Row]) -> bytes:
    packed = zlib.compress(_ROWS.dump_json(tuple(rows), exclude_defaults=True), 1)
    return place.model_dump_json().encode() + b"\n" + packed


def decode(tables: Sequence[bytes], own: bytes = b"", rows: Rows = ()) -> list[Table]:
    """The tables of all ranks; replicas send equal bytes, which are read once. `own` holds `rows` and is not read."""
    known = {own.partition(b"\n")[2]: rows} if own else {}
    found: list[Table] = []
    for table in tables:
        head, _, packed = table.partition(b"\n")
        if packed not in known:
            known[packed] = _ROWS.validate_json(zlib.decompress(packed))
        found.append(Table.model_construct(place=Place.model_validate_json(head), rows=known[packed]))
    return found


def plan_of(tables: Sequence[Table], exported: Sequence[Named] = ()) -> WeightPlan:
    """One update from what the ranks hold, the same for every rank that has the same tables. Raises SyncMismatch if a
    rank cannot send, ranks that must hold the same do not, or a name occurs twice. `exported` is what rank 0 sends
    besides, in this order."""
    _check_ranks(tables)
    place = tables[0].place
    packer = _Packer(place.arena_bytes)
    for sender, layer in _layers(_owned(tables)):
        packer.add(sender, layer)
    order = packer.turns()
    packer.open.clear()  # what is exported goes into new buckets
    packer.add(0, exported)
    order += range(len(order), len(packer.sizes))
    tensors, seen = packer.planned(order), set[str]()
    for tensor in tensors:
        if tensor.name in seen:
            raise SyncMismatch(f"{tensor.name} is the Hugging Face name of two weights of the model; nothing was sent")
        seen.add(tensor.name)
    buckets = (
        Bucket(number=number, sender=packer.senders[packed], nbytes=packer.sizes[packed])
        for number, packed in enumerate(order)
    )
    return WeightPlan(
        version=place.version,
        tensors=tuple(tensors),
        buckets=tuple(buckets),
        arena_bytes=max(packer.sizes, default=0),
        config=place.config,
    )


def _check_ranks(tables: Sequence[Table]) -> None:
    problems = [f"rank {table.place.rank}: {table.place.problem}" for table in tables if table.place.problem]
    if problems:
        raise SyncMismatch(f"the weights cannot be sent: {'; '.join(problems)}")
    asked = {(table.place.version, table.place.arena_bytes, table.place.config) for table in tables}
    if len(asked) > 1:
        raise SyncMismatch(
            f"trainer ranks were asked for different updates, or are configured differently: {sorted(asked)} (version, "
            "bytes of an arena, digest of the configuration); restart the trainer"
        )


def _owned(tables: Sequence[Table]) -> Iterator[tuple[int, Row]]:
    """Each row once, with the rank that sends it: of replicas the first, of pipeline stages the lowest."""
    seen: dict[str, Row] = {}
    for expert in (False, True):
        for first, *others in _groups(tables, expert):
            for other in others:
                _check_equal(first, other, expert)
            for row in first.of(expert):
                if row.name not in seen:
                    seen[row.name] = row
                    yield first.place.rank, row
                elif seen[row.name].tensors != row.tensors:
                    raise _differ(row.name, seen[row.name], row, "pipeline stages")


def _groups(tables: Sequence[Table], expert: bool) -> list[list[Table]]:
    """The ranks that must tell the same, by pipeline stage (and share of the experts); the one that sends first."""

    def turn(table: Table) -> tuple[int, ...]:
        at = table.place
        return (*((at.expert_replica, at.expert_tensor) if expert else (at.replica, at.tensor)), at.rank)

    found: dict[tuple[int, int], list[Table]] = {}
    for table in sorted(tables, key=turn):
        found.setdefault((table.place.stage, table.place.expert if expert else 0), []).append(table)
    return [found[key] for key in sorted(found)]


def _check_equal(first: Table, other: Table, expert: bool) -> None:
    if first.rows is other.rows:
        return
    one, two = ({row.name: row for row in table.of(expert)} for table in (first, other))
    for name in sorted(one.keys() | two.keys()):
        if one.get(name) != two.get(name):
            raise _differ(name, one.get(name), two.get(name), f"ranks {first.place.rank} and {other.place.rank}")


def _differ(name: str, one: Row | None, two: Row | None, who: str) -> SyncMismatch:
    held = [
        "nothing" if row is None else str([f"{part.name} {part.dtype} {list(part.shape)}" for part in row.tensors])
        for row in (one, two)
    ]
    fact = f"{who} of the trainer do not hold the same {name}: {held[0]} and {held[1]}; nothing was sent"
    return SyncMismatch(f"{fact}. Start the trainer again from the last state, and report this if it comes back")


def _layers(owned: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, list[Named]]]:
    """Tensors that each rank sends of each layer, in the order of layers; those that are fused are adjacent."""
    found: dict[tuple[tuple[int, int], bool, int], list[Row]] = {}
    for sender, row in owned:
        found.setdefault((_layer(row.name), row.expert, sender), []).append(row)
    for key in sorted(found):
        rows = sorted(found[key], key=lambda row: (_expert(row.name), row.name))
        yield key[-1], [tensor for row in rows for tensor in row.tensors]


def _layer(name: str) -> tuple[int, int]:
    numbered = _LAYER.match(name)
    if numbered and numbered["part"] in _PARTS:
        return _PARTS.index(numbered["part"]), int(numbered["layer"])
    return _PARTS.index("embedding" if name.startswith("embedding.") else ""), 0


def _expert(name: str) -> int:
    numbered = _EXPERT.search(name)
    return int(numbered.group(1) or numbered.group(2)) if numbered else -1


@dataclass
class _Packer:
    limit: int
    senders: list[int] = field(default_factory=list)  # sender of each bucket
    sizes: list[int] = field(default_factory=list)  # bytes of each bucket
    held: list[list[tuple[Named, int]]] = field(default_factory=list)
    """Tensors of each bucket and their first bytes in it."""
    open: dict[int, int] = field(default_factory=dict)  # number of the open bucket of each sender

    def add(self, sender: int, layer: Sequence[Named]) -> None:
        """Place a layer: in the open bucket if it fits, else in a new one, or in several if it fits in none."""
        rooms = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in layer]
        together = sum(rooms)
        used = self.sizes[self.open[sender]] if sender in self.open else 0
        if together <= self.limit < used + together:
            del self.open[sender]
        for tensor, room in zip(layer, rooms, strict=True):
            if sender not in self.open or self.sizes[self.open[sender]] + room > self.limit:
                self.open[sender] = len(self.sizes)
                self.senders.append(sender)
                self.sizes.append(0)
                self.held.append([])
            number = self.open[sender]
            self.held[number].append((tensor, self.sizes[number]))
            self.sizes[number] += room

    def turns(self) -> list[int]:
        """The buckets in an order in which senders take turns: while one's is read, the others fill theirs."""
        turn = [self.senders[:number].count(sender) for number, sender in enumerate(self.senders)]
        return sorted(range(len(turn)), key=lambda number: (turn[number], self.senders[number]))

    def planned(self, order: Sequence[int]) -> list[PlannedTensor]:
        return [
            PlannedTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, bucket=number, offset=offset)
            for number, packed in enumerate(order)
            for tensor, offset in self.held[packed]
        ]
