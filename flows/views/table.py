"""The metrics of a run as one table, a row for each iteration: the numbers of all stages, from their manifests alone.

Everything else that shows metrics (CSV, TensorBoard, curves, trackers) is made from these rows."""

import csv
import io
import itertools
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from pydantic import BaseModel, JsonValue

from storage import layout
from storage.backends.root import Root
from storage.digest import value_digest
from storage.errors import NotCommitted
from storage.manifest import Manifest
from tasks.config.evaluation import ASKED, PASS, SCORED_BY, SOURCE
from tasks.stages.names import Stage

STEP = "step/"  # prefix of the metrics of single steps, which have a file of their own

SECONDS = "seconds"  # column with the duration of the iteration, as `IterationRecord.seconds`

EVALUATED_BY = "evaluated_by"
TEXTS = (SCORED_BY, EVALUATED_BY, PASS)
"""Columns of text: the reward that scored the samples, by its functions and a digest; that of the evaluation, with its
limits; and the condition by which its answers pass. Values in rows with different texts are not comparable."""

_FIXED = ("iteration", "finished")
_SHOWN = 12  # characters of a digest
_SHORT = 6
_READABLE = 40  # characters of the functions' names
_DURATIONS = ("seconds", "_s")

_UPLOAD_S = 15.0  # least time between two uploads where a file can only be replaced as a whole
_SHARE = 20.0  # an upload takes at most this fraction of the time


class Row(BaseModel, frozen=True, extra="forbid"):
    iteration: int
    finished: datetime  # end of its last stage (UTC)
    values: dict[str, float]  # by column, STAGE/METRIC; a metric that is missing or not finite has no entry
    texts: dict[str, str] = {}  # by column, what values may be compared with; see TEXTS


def row_of(manifests: Sequence[Manifest], seconds: float) -> Row:
    """The row of an iteration from its manifests, in the order of work, and its duration."""
    values = {
        name if name.startswith(f"{one.stage}/") else f"{one.stage}/{name}": value
        for one in manifests
        # a component of a reward may be named like a number of ours, which comes last and counts
        for name, value in sorted(one.metrics.items(), key=lambda item: "/" not in item[0])
        if value is not None and math.isfinite(value) and not name.startswith(STEP)
    }
    ordered = {SECONDS: seconds, **{name: values[name] for name in sorted(values, key=_place)}}
    texts = _texts({one.stage: one.facts for one in manifests})
    return Row(iteration=manifests[0].iteration, finished=manifests[-1].finished, values=ordered, texts=texts)


def _texts(facts: Mapping[str, Mapping[str, JsonValue]]) -> dict[str, str]:
    scored, evaluated = facts.get(Stage.REWARD, {}), facts.get(Stage.EVALUATE, {})
    asked = evaluated.get(ASKED)
    limits = [f"{name} {value}" for name, value in asked.items()] if isinstance(asked, dict) else []
    found = {
        SCORED_BY: _function(scored),
        EVALUATED_BY: " ".join([*filter(None, [_function(evaluated)]), *limits]),
        PASS: str(evaluated.get(PASS, "")),
    }
    return {name: text for name, text in found.items() if text}


def _function(facts: Mapping[str, JsonValue]) -> str:
    """The names of reward functions and a digest of all that decides their values."""
    sources = facts.get(SOURCE)
    names = re.sub(r"[^\w.\-]+", "_", "+".join(sources) if isinstance(sources, dict) else "")[:_READABLE]
    return f"{names} {str(facts.get(SCORED_BY, ''))[:_SHOWN]}".strip()


class Series:
    """Names of a run's values where each name is one curve: values of different functions never share a name.

    The function of a stage's first row keeps the plain names; every other one adds a suffix of its name and a digest.
    """

    def __init__(self, earlier: Iterable[Row] = ()) -> None:
        """Start with `earlier`, the rows before those that are to be named: all, or the first of each stage."""
        self._first: dict[str, Mapping[str, str]] = {}
        for row in earlier:
            self.named(row)

    def named(self, row: Row) -> dict[str, float]:
        """The values of the next row by the names of their curves."""
        return {f"{name}{self._suffix(name, row.texts)}": value for name, value in row.values.items()}

    def _suffix(self, column: str, texts: Mapping[str, str]) -> str:
        first = self._first.setdefault(column.partition("/")[0], texts)
        here = {name: texts.get(name, "") for name in compared_by(column)}
        if all(first.get(name, "") == text for name, text in here.items()):
            return ""
        function, space, _ = next(iter(here.values())).partition(" ")
        return f" {function + '-' if space else ''}{value_digest([*here.values()])[:_SHORT]}"


def compared_by(column: str) -> tuple[str, ...]:
    """The texts that the values of a column depend on."""
    stage, _, metric = column.partition("/")
    if metric.endswith(_DURATIONS):
        return ()
    if stage == Stage.EVALUATE:
        return (EVALUATED_BY, PASS) if metric == "pass_rate" else (EVALUATED_BY,)
    return (SCORED_BY,) if stage == Stage.REWARD else ()


def _place(column: str) -> tuple[int, str]:
    stages = [stage.value for stage in Stage]
    stage = column.partition("/")[0]
    return (stages.index(stage), column) if stage in stages else (-1, column)


def encode(rows: Sequence[Row]) -> bytes:
    """The CSV: a header, then a line for each row; what a row lacks is empty."""
    columns = columns_of(rows)
    return _line([*_FIXED, *columns]) + b"".join(_cells(row, columns) for row in rows)


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns of some rows: texts first, then numbers in the order of work."""
    texts = [name for name in TEXTS if any(name in row.texts for row in rows)]
    return [*texts, *sorted({name for row in rows for name in row.values}, key=_place)]


def decode(data: bytes) -> list[Row]:
    """The rows of a CSV up to the first that is not whole."""
    lines = csv.reader(io.StringIO(data[: data.rfind(b"\n") + 1].decode(errors="replace")))
    header = next(lines, [])
    if tuple(header[:2]) != _FIXED:
        return []
    return list(itertools.takewhile(lambda row: row is not None, (_row(header[2:], cells) for cells in lines)))  # pyright: ignore[reportReturnType]


def _row(columns: Sequence[str], cells: Sequence[str]) -> Row | None:
    if len(cells) != len(columns) + len(_FIXED):
        return None
    try:
        iteration, finished = int(cells[0]), datetime.fromisoformat(cells[1])
        given = {name: cell for name, cell in zip(columns, cells[2:], strict=True) if cell}
        texts = {name: given.pop(name) for name in TEXTS if name in given}
        values = {name: float(cell) for name, cell in given.items()}
    except ValueError:
        return None
    return Row(iteration=iteration, finished=finished, values=values, texts=texts)


def _cells(row: Row, columns: Sequence[str]) -> bytes:
    values = [repr(row.values[name]) if name in row.values else row.texts.get(name, "") for name in columns]
    return _line([str(row.iteration), row.finished.isoformat(), *values])


def _line(cells: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def warmup_csv(manifest: Manifest | None) -> bytes:
    """The loss of each step of the warm-up as CSV; empty if there was none."""
    metrics = {} if manifest is None else manifest.metrics
    steps = sorted((int(name[len(STEP) :]), value) for name, value in metrics.items() if name.startswith(STEP))
    lines = [_line([str(number), "" if value is None else repr(value)]) for number, value in steps]
    return b"".join([_line(["step", "loss"]), *lines]) if lines else b""


class MetricsFile:
    def __init__(self, root: Root, run: str) -> None:
        self._file = GrowingFile(root, layout.report_key(run, layout.METRICS))
        self._columns: list[str] = []

    def load(self, complete: int) -> list[Row]:
        """The rows of the first `complete` iterations, as far as the file has them; anything else in it is dropped."""
        there = enumerate(decode(self._file.read())[:complete])
        rows = [row for _, row in itertools.takewhile(lambda one: one[0] == one[1].iteration, there)]
        self.write(rows)
        return rows

    def write(self, rows: Sequence[Row]) -> None:
        self._columns = columns_of(rows)
        if self._file.read() != (whole := encode(rows)):
            self._file.replace(whole)

    def add(self, row: Row) -> None:
        """Add the row of the next iteration. A column that is new makes the file be written again."""
        if not {*row.values, *row.texts} <= set(self._columns):
            rows = [*decode(self._file.read()), row]
            self._columns = columns_of(rows)
            self._file.replace(encode(rows))
        else:
            self._file.append(_cells(row, self._columns))

    def rows(self) -> list[Row]:
        return decode(self._file.read())

    def flush(self) -> None:
        self._file.flush()


class GrowingFile:
    """Appended to where the store can; elsewhere kept in memory and uploaded whole, from time to time."""

    def __init__(self, root: Root, key: str, seconds: float = _UPLOAD_S) -> None:
        self._root, self._key, self._seconds = root, key, seconds
        self._whole: bytearray | None = None
        self._due, self._behind = 0.0, False

    def read(self) -> bytes:
        """The content so far; empty if nothing was written."""
        if self._whole is not None:
            return bytes(self._whole)
        try:
            return self._root.read_bytes(self._key)
        except NotCommitted:
            return b""

    def replace(self, data: bytes) -> None:
        self._whole = None if self._root.backend.appends else bytearray(data)
        self._upload(data)

    def append(self, data: bytes) -> None:
        if self._root.backend.appends:
            return self._root.append(self._key, data)
        if self._whole is None:
            self._whole = bytearray(self.read())
        self._whole += data
        self._behind = True
        if time.monotonic() >= self._due:
            self.flush()
        return None

    def flush(self) -> None:
        if self._behind and self._whole is not None:
            self._upload(bytes(self._whole))

    def _upload(self, data: bytes) -> None:
        began = time.monotonic()
        self._root.replace(self._key, data)
        self._behind = False
        now = time.monotonic()
        self._due = now + max(self._seconds, _SHARE * (now - began))
