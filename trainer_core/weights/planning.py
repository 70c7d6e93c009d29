"""The plan of an update, which every rank makes of the tables of all ranks. Imports without torch."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from storage.errors import SyncMismatch
from trainer_core.weights.plan import ALIGNMENT, Bucket, PlannedTensor, WeightPlan, size_of
from trainer_core.weights.table import Named, Place, Row, Rows, Table

_LAYER = re.compile(r"^(?P<part>\w+)\.layers\.(?P<layer>\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.|linear_fc\d\.(?:weight|bias)(\d+)$)")
_PARTS = ("embedding", "decoder", "", "mtp")
"""The order in which a model is sent; what belongs to no layer (final norm, output layer) comes after the decoder."""


def plan_of(tables: Sequence[Table], exported: Sequence[Named] = ()) -> WeightPlan:
    """One update from what the ranks hold, the same for every rank that has the same tables.

    Args:
        tables: of all ranks, in their order.
        exported: what rank 0 sends besides, in this order.

    Raises:
        SyncMismatch: a rank cannot send, ranks that must hold the same do not, or a name occurs twice.
    """
    _check_ranks(tables)
    place = tables[0].place
    packer = _Packer(place.arena_bytes)
    for sender, layer in _layers(_owned(tables)):
        packer.add(sender, layer)
    order = packer.turns()
    packer.close()
    packer.add(0, exported)
    order += range(len(order), len(packer.sizes))
    tensors = packer.planned(order)
    _check_names(tensors)
    return WeightPlan(
        version=place.version,
        tensors=tuple(tensors),
        buckets=tuple(
            Bucket(number=number, sender=packer.senders[packed], nbytes=packer.sizes[packed])
            for number, packed in enumerate(order)
        ),
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
        for group in _groups(tables, expert):
            first = group[0]
            for other in group[1:]:
                _check_equal(first, other, expert)
            for row in _rows(first.rows, expert):
                if row.name not in seen:
                    seen[row.name] = row
                    yield first.place.rank, row
                elif seen[row.name].tensors != row.tensors:
                    raise _differ(row.name, seen[row.name], row, "pipeline stages")


def _groups(tables: Sequence[Table], expert: bool) -> list[list[Table]]:
    """The ranks that must tell the same, by pipeline stage (and share of the experts); the one that sends first."""
    found: dict[tuple[int, ...], list[Table]] = {}
    for table in tables:
        found.setdefault(_share(table.place, expert), []).append(table)
    return [sorted(found[key], key=lambda table: _turn(table.place, expert)) for key in sorted(found)]


def _share(place: Place, expert: bool) -> tuple[int, ...]:
    return (place.stage, place.expert) if expert else (place.stage,)


def _turn(place: Place, expert: bool) -> tuple[int, ...]:
    turn = (place.expert_replica, place.expert_tensor) if expert else (place.replica, place.tensor)
    return (*turn, place.rank)


def _rows(rows: Rows, expert: bool) -> Iterable[Row]:
    return (row for row in rows if row.expert == expert)


def _check_equal(first: Table, other: Table, expert: bool) -> None:
    if first.rows is other.rows:
        return
    one, two = ({row.name: row for row in _rows(table.rows, expert)} for table in (first, other))
    ranks = f"ranks {first.place.rank} and {other.place.rank}"
    for name in sorted(one.keys() | two.keys()):
        if one.get(name) != two.get(name):
            raise _differ(name, one.get(name), two.get(name), ranks)


def _differ(name: str, one: Row | None, two: Row | None, who: str) -> SyncMismatch:
    return SyncMismatch(
        f"{who} of the trainer do not hold the same {name}: {_held(one)} and {_held(two)}; nothing was sent. Start the "
        "trainer again from the last state, and report this if it comes back"
    )


def _held(row: Row | None) -> str:
    if row is None:
        return "nothing"
    return str([f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in row.tensors])


def _layers(owned: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, list[Named]]]:
    """Tensors that each rank sends of each layer, in the order of layers; those that are fused are adjacent."""
    found: dict[tuple[int, bool, tuple[int, int]], list[Row]] = {}
    for sender, row in owned:
        found.setdefault((sender, row.expert, _layer(row.name)), []).append(row)
    for key in sorted(found, key=lambda key: (key[2], key[1], key[0])):
        rows = sorted(found[key], key=lambda row: (_expert(row.name), row.name))
        yield key[0], [tensor for row in rows for tensor in row.tensors]


def _layer(name: str) -> tuple[int, int]:
    numbered = _LAYER.match(name)
    if numbered and numbered["part"] in _PARTS:
        return _PARTS.index(numbered["part"]), int(numbered["layer"])
    return (_PARTS.index("embedding") if name.startswith("embedding.") else _PARTS.index("")), 0


def _expert(name: str) -> int:
    numbered = _EXPERT.search(name)
    return int(numbered.group(1) or numbered.group(2)) if numbered else -1


def _check_names(tensors: Iterable[PlannedTensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise SyncMismatch(f"{tensor.name} is the Hugging Face name of two weights of the model; nothing was sent")
        seen.add(tensor.name)


@dataclass
class _Packer:
    """Places tensors in buckets, one open bucket for each sender."""

    limit: int
    senders: list[int] = field(default_factory=list)
    """Values by bucket."""
    sizes: list[int] = field(default_factory=list)
    """Values by bucket."""
    _held: list[list[tuple[Named, int]]] = field(default_factory=list)
    """Tensors of each bucket and their first bytes in it."""
    _open: dict[int, int] = field(default_factory=dict)

    def add(self, sender: int, layer: Sequence[Named]) -> None:
        """Place a layer: in the open bucket if it fits, else in a new one, or in several if it fits in none."""
        rooms = [_room(tensor) for tensor in layer]
        together = sum(rooms)
        used = self.sizes[self._open[sender]] if sender in self._open else 0
        if together <= self.limit < used + together:
            del self._open[sender]
        for tensor, room in zip(layer, rooms, strict=True):
            self._place(sender, tensor, room)

    def close(self) -> None:
        """Close all buckets: later tensors go into new ones."""
        self._open.clear()

    def turns(self) -> list[int]:
        """The buckets in an order in which senders take turns: while one's is read, the others fill theirs."""
        turn = [self.senders[:number].count(sender) for number, sender in enumerate(self.senders)]
        return sorted(range(len(turn)), key=lambda number: (turn[number], self.senders[number]))

    def planned(self, order: Sequence[int]) -> list[PlannedTensor]:
        """All tensors, the buckets being numbered in that order."""
        return [
            PlannedTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, bucket=number, offset=offset)
            for number, packed in enumerate(order)
            for tensor, offset in self._held[packed]
        ]

    def _place(self, sender: int, tensor: Named, room: int) -> None:
        if sender not in self._open or self.sizes[self._open[sender]] + room > self.limit:
            self._open[sender] = len(self.sizes)
            self.senders.append(sender)
            self.sizes.append(0)
            self._held.append([])
        number = self._open[sender]
        self._held[number].append((tensor, self.sizes[number]))
        self.sizes[number] += room


def _room(tensor: Named) -> int:
    """Bytes with those that align the next one."""
    return -(-size_of(tensor.dtype, tensor.shape) // ALIGNMENT) * ALIGNMENT
