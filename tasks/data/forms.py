"""Records of one local file, JSONL, JSON, CSV or Parquet, each with its own types and its place for messages.

A record holds what JSON can hold: anything else in a file is refused with its place, because a reward would be given
something that was guessed.
"""

import csv
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet
from fsspec.compression import compr
from fsspec.utils import infer_compression

from storage.errors import InputError
from tasks.data.values import Flaw, flaw, parsed

Record = Mapping[str, Any]

ARROW_ROWS = 1024
"""Rows of a column table that are objects at once."""

_SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"
}  # fmt: skip
_NO_OBJECT = (ValueError, OverflowError, KeyError, pa.ArrowException)
"""Errors of Arrow about a value that is no object of Python, such as a date after the year 9999."""
_FOREIGN = (".zst", ".lz4", ".sz", ".br", ".7z", ".tar", ".tgz", ".rar")
"""Ends of packed files that fsspec reads only with a package that is not here, or not at all."""


class Read(NamedTuple):
    """One record."""

    place: str
    """Its place, for messages: source, file and number from 1."""
    values: Record


def form_of(name: str) -> str | None:
    """The form that the end of a file's name tells, in upper or lower case; None if it tells none."""
    path = Path(name)
    return _SUFFIXES.get((path.with_suffix("") if infer_compression(path.name) else path).suffix.lower())


class LeftOut:
    """Fields that records are without."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self._unseen = set(self._names)

    def rest(self, values: Record) -> Record:
        """A record without them."""
        if not self._names:
            return values
        self._unseen.difference_update(values)
        return {name: one for name, one in values.items() if name not in self._names}

    def check(self, where: str) -> None:
        """Raises InputError: no record has had one of them."""
        if self._unseen:
            raise InputError(f"{where}: no record has the field {min(self._unseen)!r}, which data.leave_out names")


def read(file: Path, form: str, where: str, left_out: LeftOut) -> Iterator[Read]:
    """The records of a file.

    Raises:
        InputError: something in it is no record, naming its line or record, and its field.
    """
    if form == "parquet":
        with opened_parquet(file, where) as table:
            yield from of_tables(table.iter_batches(ARROW_ROWS), where, left_out)
        return
    for number, values in enumerate(objects(file, form, where), 1):
        place = f"{where}, record {number}"
        yield Read(place, _checked(left_out.rest(values), place))


def objects(file: Path, form: str, where: str) -> Iterator[Record]:
    """The objects of a file of lines; their values are not checked. Raises InputError as `read`."""
    with _unpacked(file, where) as stream:
        yield from _READERS[form](stream, where)


def of_tables(tables: Iterable[pa.RecordBatch | pa.Table], where: str, left_out: LeftOut) -> Iterator[Read]:
    """The records of tables of columns; raises InputError as `read`."""
    number = 0
    for table in tables:
        names = table.schema.names
        check_different(names, where, "the table")
        kept = table.select(list(left_out.rest(dict.fromkeys(names))))
        for number, values in enumerate(_rows(kept, where, number), number + 1):  # noqa: B020
            place = f"{where}, record {number}"
            yield Read(place, _checked(values, place))


def _rows(table: pa.RecordBatch | pa.Table, where: str, before: int) -> list[Record]:
    try:
        return table.to_pylist(maps_as_pydicts="strict")
    except _NO_OBJECT:
        for name, column in zip(table.schema.names, table.columns, strict=True):
            for row, value in enumerate(column, before + 1):
                _check_object(value, f"{where}, record {row}: field {name!r}")
        raise


def _check_object(value: pa.Scalar, place: str) -> None:
    try:
        value.as_py(maps_as_pydicts="strict")
    except _NO_OBJECT as error:
        raise InputError(f"{place} cannot be read ({error}). Correct it, or leave it out with data.leave_out") from None


def _checked(values: Record, place: str) -> Record:
    """The values of a record. Raises InputError: one of them is nothing that a record can hold."""
    try:
        found = flaw(values)
    except RecursionError:
        found = Flaw("", "is nested too deeply")
    if found is None:
        return values
    what = f"field {found.place.removeprefix('.')!r}" if found.place else "it"
    raise InputError(
        f"{place}: {what} {found.fact}. A record holds what JSON can "
        "hold: write a text, a number or null there, or leave the field out with data.leave_out"
    )


@contextmanager
def _unpacked(file: Path, where: str) -> Iterator[IO[bytes]]:
    """Content of a file, unpacked if its name tells that it is packed. Raises InputError: an archive of several."""
    packed = infer_compression(file.name)
    if packed is None and file.suffix.lower() in _FOREIGN:
        raise InputError(f"{where} is packed in a form that cannot be read here ({file.suffix}): unpack it, or use .gz")
    with file.open("rb") as raw:
        if packed == "zip" and len(names := zipfile.ZipFile(raw).namelist()) != 1:
            raise InputError(f"{where} is an archive of {len(names)} files, but one is expected: pack each by itself")
        with compr[packed](raw, mode="rb") as stream:  # pyright: ignore[reportArgumentType] - a dict of any names
            yield stream


def _json_lines(stream: Iterable[bytes], where: str) -> Iterator[dict[str, Any]]:
    """The objects of a stream with one in each line; blank lines are skipped. Raises InputError: a line is something
    else, naming it."""
    for number, line in enumerate(stream, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                yield _an_object(parsed(text), f"{where}, line {number}")
        except ValueError as error:
            raise InputError(
                f"{where}, line {number}: not valid JSON ({error}). Fix or remove the line: each is one whole object, "
                'unless the format is "json" and the file one array'
            ) from None


def _json(stream: IO[bytes], where: str) -> Iterator[Record]:
    """One array of objects, or lines."""
    lines = iter(stream)
    first = next((line for line in lines if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    if not first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from _json_lines(_after(first, lines), where)
        return
    try:
        found = parsed((first + b"".join(lines)).decode("utf-8-sig"))
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({error}). Fix it, or write one object a line") from None
    for number, one in enumerate(found, 1):
        yield _an_object(one, f"{where}, element {number}")


def _after(first: bytes, lines: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from lines


def _an_object(found: object, place: str) -> dict[str, Any]:
    if isinstance(found, dict):
        return found
    repair = 'A file that is one array has the format "json"' if isinstance(found, list) else "Fix or remove it"
    raise InputError(f"{place}: a {type(found).__name__} where an object is expected. {repair}")


def _csv(stream: IO[bytes], where: str, delimiter: str = ",") -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)  # a prompt may be longer than the default of 128 KiB
    with TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        rows = csv.DictReader(text, delimiter=delimiter, strict=True)
        try:
            check_different(rows.fieldnames or (), where, "the header")
            for row in rows:
                if None in row or None in row.values():
                    count = (
                        f"{'more' if None in row else 'fewer'} fields than the header's {len(rows.fieldnames or [])}"
                    )
                    raise InputError(f"{where}, line {rows.line_num}: {count}. Fix or remove the line")
                yield row
        except UnicodeDecodeError as error:
            raise InputError(
                f"{where}, after line {rows.line_num}: not UTF-8 ({error}). Write the file in UTF-8"
            ) from None
        except csv.Error as error:
            raise InputError(f"{where}, line {rows.reader.line_num}: not valid CSV ({error}). Fix the line") from None


def _tsv(stream: IO[bytes], where: str) -> Iterator[Record]:
    return _csv(stream, where, "\t")


@contextmanager
def opened_parquet(file: Path, where: str) -> Iterator[pyarrow.parquet.ParquetFile]:
    """A Parquet file; raises InputError if it is none."""
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise InputError(f"{where} is not a Parquet file: {error}. Set its format, or unpack it") from None
    with table:
        yield table


def check_different(names: Sequence[str], where: str, what: str) -> None:
    """Raises InputError: two fields have one name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{where}: {what} has the field {twice!r} twice, and one would hide the other: rename one")


_READERS: Mapping[str, Callable[[IO[bytes], str], Iterator[Record]]] = {
    "jsonl": _json_lines, "json": _json, "csv": _csv, "tsv": _tsv
}  # fmt: skip
