"""Rows of JSONL and Parquet files, some at a time."""

import json
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import IO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from storage.errors import InputError

_ROWS = 8192


@dataclass(frozen=True)
class Batch:
    """Some rows of a file."""

    file: str
    first: int
    """Rows of the file before these."""
    names: tuple[str, ...]
    """Columns that the file has."""
    table: pa.Table
    """Those of them that are wanted."""


def read_batches(file: str, wanted: Collection[str]) -> Iterator[Batch]:
    """The wanted columns of a .jsonl or .parquet file.

    Raises:
        InputError: it is another file, does not exist or cannot be read.
    """
    if not file.endswith((".jsonl", ".parquet")):
        raise InputError(f"{file} cannot be imported: give files that end with .jsonl or .parquet")
    try:
        with fsspec.open(file, "rb") as opened:
            read = _parquet if file.endswith(".parquet") else _json_lines
            yield from read(file, opened, wanted)  # pyright: ignore[reportArgumentType]
    except FileNotFoundError:
        raise InputError(f"{file} does not exist: give the path or URL of a .jsonl or .parquet file") from None
    except (pa.ArrowException, OSError, ImportError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def _parquet(file: str, opened: IO[bytes], wanted: Collection[str]) -> Iterator[Batch]:
    with closing(pq.ParquetFile(opened)) as parquet:
        names, first = tuple(parquet.schema_arrow.names), 0
        for batch in parquet.iter_batches(_ROWS, columns=[name for name in names if name in wanted]):
            yield Batch(file, first, names, pa.Table.from_batches([batch]))
            first += batch.num_rows


def _json_lines(file: str, opened: IO[bytes], wanted: Collection[str]) -> Iterator[Batch]:
    rows: list[dict[str, JsonValue]] = []
    number = 0
    for number, line in enumerate(opened, 1):
        rows.append(_record(file, number, line))
        if len(rows) == _ROWS:
            yield _batch(file, number - len(rows), rows, wanted)
            rows = []
    if rows:
        yield _batch(file, number - len(rows), rows, wanted)


def _record(file: str, number: int, line: bytes) -> dict[str, JsonValue]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{file}, line {number}: it is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise InputError(f"{file}, line {number}: it is a {type(row).__name__}, not a record")
    return row


def _batch(file: str, first: int, rows: list[dict[str, JsonValue]], wanted: Collection[str]) -> Batch:
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names if name in wanted}
    return Batch(file, first, names, pa.table({name: _array(file, name, values) for name, values in columns.items()}))


def _array(file: str, name: str, values: list[JsonValue]) -> pa.Array:
    try:
        return pa.array(values)
    except pa.ArrowException as error:
        raise InputError(f"{file}: the values of {name!r} are of different kinds ({error})") from None
