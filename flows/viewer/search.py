"""Search over the samples of a run by the conditions of `ratchet retrain --where`."""

import shlex
import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import acero

from storage.backends.root import Root
from storage.filters import Condition, parse_condition
from storage.parallel import each
from storage.selection import OFFERED, offered_columns
from tasks.config.credentials import shown_text
from tasks.config.retrain import RetrainSection
from tasks.stages.selecting import Rollout, rollouts

SHOWN = 100  # most samples of an answer
ORDERS = {"stored": "as they were sampled", "best": "highest reward first", "worst": "lowest reward first"}
_COLUMNS = ["iteration", "prompt_id", "sample_id", "reward", "status"]
_NONE = pa.table({})
_KEPT = 1 << 28  # bytes; a million samples with short ids take 60 MB
_EMPTY = pa.schema([(name, OFFERED.field(name).type) for name in _COLUMNS]).empty_table()
_READERS = 2
_SORT = {"best": "descending", "worst": "ascending"}


@dataclass(frozen=True)
class Query:
    run: str
    where: str = ""
    first: int = 1
    last: int | None = None
    order: str = "stored"

    @property
    def place(self) -> str:
        """The iterations, as `--select` takes them."""
        return f"{self.run}@{self.first}-{'' if self.last is None else self.last}"

    def command(self, root: str) -> str:
        """The command that trains a new run on the answer."""
        where = [f"--where={self.where}"] if self.where.strip() else []
        words = ["ratchet", "retrain", "NEW", f"--from={self.run}", f"--select={self.place}", *where]
        return shlex.join([*words, f"--root={shown_text(root)}"])


@dataclass(frozen=True)
class Answer:
    examined: int
    found: int
    unscored: tuple[int, ...]  # iterations that were left out, because they are not scored yet
    counts: tuple[tuple[int, int], ...]  # samples that were found by iteration; those without any are left out
    rows: tuple[dict, ...]  # the first SHOWN of them


class Columns:
    """Columns of scored rollouts, of lists the lengths. They stay in memory up to a limit: the oldest go first."""

    def __init__(self, limit: int = _KEPT) -> None:
        self._limit, self._bytes = limit, 0
        self._kept: OrderedDict[tuple[str, ...], pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, rollout: Rollout, names: Collection[str]) -> pa.Table:
        """The columns `names` of a rollout, among others."""
        key = (rollout.manifest.key, *(one.digest for one in (rollout.manifest, rollout.reward) if one is not None))
        with self._lock:
            kept = self._kept.get(key, _NONE)
        if missing := [name for name in names if name not in kept.column_names]:
            read = pa.concat_tables(offered_columns(rollout.root, rollout.manifest, rollout.reward, missing))
            kept = pa.table({**_columns(kept), **_columns(read.combine_chunks())})
            self._keep(key, kept)
        return kept

    def _keep(self, key: tuple[str, ...], table: pa.Table) -> None:
        with self._lock:
            before = self._kept.pop(key, _NONE)
            self._kept[key] = table
            self._bytes += table.nbytes - before.nbytes
            while self._bytes > self._limit:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))


def search(root: Root, query: Query, columns: Columns) -> Answer:
    """Examine all samples of the query's iterations. In memory are what `columns` keeps, the columns that the query
    names of one rollout for each reader, and the rows that are shown. Raises InputError: the condition, run or
    iterations cannot be used."""
    condition = parse_condition(query.where, OFFERED) if query.where.strip() else None
    section = RetrainSection(start=f"{query.run}@0", select=(query.place,), where=query.where)
    every = list(rollouts(root, section))
    scored = [one for one in every if one.reward is not None]
    parts = each(lambda rollout: _of_rollout(columns, rollout, condition, query.order), scored, _READERS)
    counts = [(one.manifest.iteration, found) for one, (_, found, _) in zip(scored, parts, strict=True) if found]
    return Answer(
        examined=sum(examined for examined, _, _ in parts),
        found=sum(found for _, found, _ in parts),
        unscored=tuple(one.manifest.iteration for one in every if one.reward is None),
        counts=tuple(counts),
        rows=tuple(_first(pa.concat_tables([_EMPTY, *(table for _, _, table in parts)]), query.order).to_pylist()),
    )


def _of_rollout(
    columns: Columns, rollout: Rollout, condition: Condition | None, order: str
) -> tuple[int, int, pa.Table]:
    """Samples examined and found, and the first of them with the columns that are shown."""
    table = columns.of(rollout, {*_COLUMNS, *(condition.columns if condition is not None else ())})
    shown = table.select(_COLUMNS)
    kept = shown if condition is None else shown.filter(_are_true(table, condition))
    return table.num_rows, kept.num_rows, _first(kept, order)


def _are_true(table: pa.Table, condition: Condition) -> pa.ChunkedArray:
    """The truth of a condition for each row. `Table.filter` would copy lists and maps too."""
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table.select(sorted(condition.columns))))
    truths = acero.Declaration("project", acero.ProjectNodeOptions([condition.expression], ["kept"]), [source])
    return truths.to_table(use_threads=False)["kept"]


def _first(table: pa.Table, order: str) -> pa.Table:
    if order not in _SORT:
        return table.slice(0, SHOWN)
    scored = table.filter(pc.is_finite(table["reward"]))  # pyright: ignore[reportAttributeAccessIssue] - made at import
    return scored.take(pc.select_k_unstable(scored, SHOWN, [("reward", _SORT[order])]))  # pyright: ignore[reportAttributeAccessIssue]
