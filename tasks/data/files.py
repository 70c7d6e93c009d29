"""Records of prompt sources: JSONL, JSON, CSV or Parquet files on any fsspec filesystem, and data sets of the hub.

Records are read one after another, so a large source never is in memory as a whole, unless it is one JSON array. A
record holds what JSON can hold, with its own types: anything else is refused with its place, because a reward would be
given something that was guessed."""

import csv
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet
import xxhash
from fsspec.compression import compr
from fsspec.utils import infer_compression

from storage.digest import file_digest, value_digest
from storage.errors import InputError
from storage.ownership.scratch import scratch
from tasks.config.credentials import referenced
from tasks.config.data import DataSource
from tasks.config.environment import resolve, without_secrets
from tasks.data import hub
from tasks.data.values import Flaw, flaw, is_encodable, parsed, without_nulls

if TYPE_CHECKING:
    from datasets import Dataset

Record = Mapping[str, Any]
_ROWS = 1024  # of a column table that are objects at once
_SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"
}  # fmt: skip
_NO_OBJECT = (ValueError, OverflowError, KeyError, pa.ArrowException)
"""Errors of Arrow about a value that is not an object of Python, such as a date after the year 9999."""
_FOREIGN = (".zst", ".lz4", ".sz", ".br", ".7z", ".tar", ".tgz", ".rar")
"""Ends of packed files that fsspec reads only with a package that is not here, or not at all."""
_BLANKS = b"\xef\xbb\xbf \t\r\n"


class Read(NamedTuple):
    """One record, with its place for messages: source, file and number from 1."""

    place: str
    values: Record


@dataclass(frozen=True)
class Opened:
    digest: str  # identity of its content
    records: Callable[[], Iterator[Read]]  # its records, from the first; raises InputError where one cannot be read


@contextmanager
def opened(source: DataSource, download: bool = False) -> Iterator[Opened]:
    """A source, whose `source` may be a reference (`env:NAME`), with its files on this machine while the block lasts;
    with `download`, a data set of the hub may be downloaded. Raises InputError: it does not exist or cannot be read."""
    address = str(resolve(source.source, "the URL of a dataset"))
    form = source.format or form_of(path_of(address))
    if hub.is_dataset(address) and form is None and not Path(address).exists():
        rows, hasher = hub.rows(source, address, download), xxhash.xxh3_128()
        for one in _of_hub(source, rows):  # the rows' content, whatever files they come from
            hasher.update(json.dumps(one.values, sort_keys=True).encode())
        yield Opened(hasher.hexdigest(), lambda: _columns(source, _of_hub(source, rows)))
        return
    with scratch() as folder:
        files = fetched(source.source, address, folder)
        digests = [file_digest(file)[0] for file in files]
        whole = digests[0] if len(digests) == 1 else value_digest(digests)
        yield Opened(whole, lambda: _records(source, form, files))


def state(source: DataSource) -> str:
    """Identity of a source without reading it: it changes with its files, as far as their filesystem tells."""
    with suppress(InputError), reading(source.source):
        address = str(resolve(source.source, "the URL of a dataset"))
        fs, path = _filesystem(address)
        return value_digest([address, *(fs.ukey(one) for one in _matching(fs, path))])
    return value_digest([source.source])


def name_of(source: DataSource) -> str:
    """Prefix of the ids of a source's prompts; by default the end of its address without suffix."""
    if source.name is not None:
        return source.name
    address = referenced(source.source) or source.source
    address = address.partition("@")[0] if hub.is_dataset(address) else address
    parts = [part for part in path_of(address).split("/") if part and "*" not in part and "[" not in part]
    return parts[-1].partition(".")[0] or parts[-1] if parts else address


@contextmanager
def reading(shown: str, form: str = "") -> Iterator[None]:
    """Make an InputError of whatever goes wrong in a block that reads a source."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(_missing(shown)) from None
    except Exception as error:  # noqa: BLE001 - whatever filesystems, codecs and Arrow raise about what is foreign to us
        reason = without_secrets(str(error)) or type(error).__name__
        raise InputError(f"dataset {shown} cannot be read{form}: {reason}. Correct it, or its format") from None


def fetched(shown: str, address: str, folder: Path) -> list[Path]:
    """The local files of an address; those of another machine are copied into `folder`."""
    with reading(shown):
        fs, path = _filesystem(address)
        if not (names := _matching(fs, path)):
            raise InputError(_missing(shown))
        if odd := [name for name in names if not is_encodable(name)]:
            raise InputError(f"the name of the file {odd[0]!r} is not UTF-8, so no record can hold it: rename the file")
        if any(fs.isdir(name) for name in names):
            pattern = f"{shown.rstrip('/')}/*.jsonl"
            raise InputError(f"dataset {shown} is a folder: name its files by a pattern, such as {pattern}")
        if "file" in fs.protocol:
            return [Path(name) for name in names]
        plain = [re.sub(r"[^A-Za-z0-9._-]", "_", path_of(name).rpartition("/")[2])[-80:] for name in names]
        places = [folder / f"{number:05d}-{name}" for number, name in enumerate(plain)]
        for name, place in zip(names, places, strict=True):
            fs.get_file(name, str(place))
        return places


def path_of(address: str) -> str:
    """An address without query and fragment if it is a URL; in other names `?` and `#` are letters."""
    return re.sub(r"[?#].*", "", address) if address.startswith(("http://", "https://")) else address


def form_of(name: str) -> str | None:
    """The form that the end of a file's name tells, in upper or lower case; None if it tells none."""
    path = Path(name)
    return _SUFFIXES.get((path.with_suffix("") if infer_compression(path.name) else path).suffix.lower())


def objects(file: Path, form: str, where: str) -> Iterator[Record]:
    """The objects of a file of lines; their values are not checked. Raises InputError: something in it is not a record,
    naming its line or record, and its field."""
    with _unpacked(file, where) as stream:
        yield from _READERS[form](stream, where)


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
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise InputError(f"{where}: {what} has the field {twice!r} twice, and one would hide the other: rename one")


def _missing(shown: str) -> str:
    both = " (no such file, and no data set of the hub: that needs org/name and a split)" if "/" in shown else ""
    forms = "JSONL, JSON, CSV or Parquet"
    return f"dataset {shown} does not exist{both}: give the path or URL of a {forms} file, or a pattern that fits some"


def _filesystem(address: str) -> tuple[Any, str]:
    """The filesystem of an address, and its path there. A `::` in the name of a local file is not a chain of URLs."""
    if "://" in address:
        return fsspec.core.url_to_fs(address)
    return fsspec.filesystem("file"), str(Path(address).expanduser().absolute())


def _matching(fs: Any, path: str) -> list[str]:
    """The files of a path or pattern, in the order of their names. In http addresses `?` and `[` have other uses."""
    if "http" in fs.protocol or not any(sign in path for sign in "*?[") or fs.exists(path):
        return [path] if fs.exists(path) else []
    return sorted(str(name) for name in fs.glob(path))


class _LeftOut:
    """Fields that records are without."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names, self._unseen = frozenset(names), set(names)

    def rest(self, values: Record) -> Record:
        self._unseen.difference_update(values)
        return {name: one for name, one in values.items() if name not in self._names} if self._names else values

    def check(self, where: str) -> None:
        if self._unseen:
            raise InputError(f"{where}: no record has the field {min(self._unseen)!r}, which data.leave_out names")


def _records(source: DataSource, form: str | None, files: list[Path]) -> Iterator[Read]:
    left_out = _LeftOut(source.leave_out or ())
    for file in files:
        shown = source.source + (f", {file.name!r}," if len(files) > 1 else "")
        kind = source.format or form_of(file.name) or form or "jsonl"
        with reading(shown, f" as {kind}"):
            yield from _of_file(source, file, kind, f"dataset {shown.rstrip(',')}", left_out)
    left_out.check(f"dataset {source.source}")


def _of_file(source: DataSource, file: Path, form: str, where: str, left_out: _LeftOut) -> Iterator[Read]:
    if form == "parquet":
        with opened_parquet(file, where) as table:
            yield from _columns(source, _of_tables(table.iter_batches(_ROWS), where, left_out))
        return
    for number, values in enumerate(objects(file, form, where), 1):
        place = f"{where}, record {number}"
        yield Read(place, _checked(left_out.rest(values), place))


def _of_hub(source: DataSource, rows: "Dataset") -> Iterator[Read]:
    where, left_out = f"dataset {source.source}", _LeftOut(source.leave_out or ())
    with reading(source.source):  # as they are stored: pictures and sounds are not decoded
        yield from _of_tables(rows.with_format("arrow").iter(_ROWS), where, left_out)  # pyright: ignore[reportArgumentType]
    left_out.check(where)


def _of_tables(tables: Iterable[pa.RecordBatch | pa.Table], where: str, left_out: _LeftOut) -> Iterator[Read]:
    number = 0
    for table in tables:
        names = table.schema.names
        check_different(names, where, "the table")
        kept = table.select(list(left_out.rest(dict.fromkeys(names))))
        for number, values in enumerate(_rows(kept, where, number), number + 1):  # noqa: B020
            place = f"{where}, record {number}"
            yield Read(place, _checked(values, place))


def _columns(source: DataSource, found: Iterable[Read]) -> Iterator[Read]:
    """Records of columns, without the nulls that only fill them in messages."""
    messages = (source.prompt_field, source.answer_field, source.tools_field)
    for place, values in found:
        yield Read(place, {name: without_nulls(one) if name in messages else one for name, one in values.items()})


def _rows(table: pa.RecordBatch | pa.Table, where: str, before: int) -> list[Record]:
    try:
        return table.to_pylist(maps_as_pydicts="strict")
    except _NO_OBJECT:
        for name, column in zip(table.schema.names, table.columns, strict=True):
            for row, value in enumerate(column, before + 1):
                try:
                    value.as_py(maps_as_pydicts="strict")
                except _NO_OBJECT as error:
                    fact = f"{where}, record {row}: field {name!r} cannot be read ({error})"
                    raise InputError(f"{fact}. Correct it, or leave it out with data.leave_out") from None
        raise


def _checked(values: Record, place: str) -> Record:
    """The values of a record. Raises InputError: one of them is nothing that a record can hold."""
    try:
        found = flaw(values)
    except RecursionError:
        found = Flaw("", "is nested too deeply")
    if found is None:
        return values
    fact = f"{f'field {found.place.removeprefix(".")!r}' if found.place else 'it'} {found.fact}"
    repair = "write a text, a number or null there, or leave the field out with data.leave_out"
    raise InputError(f"{place}: {fact}. A record holds what JSON can hold: {repair}")


@contextmanager
def _unpacked(file: Path, where: str) -> Iterator[IO[bytes]]:
    """Content of a file, unpacked if its name tells that it is packed. Raises InputError: an archive of several."""
    if (packed := infer_compression(file.name)) is None and file.suffix.lower() in _FOREIGN:
        raise InputError(f"{where} is packed in a form that cannot be read here ({file.suffix}): unpack it, or use .gz")
    with file.open("rb") as raw:
        if packed == "zip" and len(names := zipfile.ZipFile(raw).namelist()) != 1:
            raise InputError(f"{where} is an archive of {len(names)} files, but one is expected: pack each by itself")
        with compr[packed](raw, mode="rb") as stream:  # pyright: ignore[reportArgumentType] - a dict of any names
            yield stream


def _json_lines(stream: Iterable[bytes], where: str) -> Iterator[Record]:
    for number, line in enumerate(stream, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                yield _an_object(parsed(text), f"{where}, line {number}")
        except ValueError as error:
            fact = f"{where}, line {number}: not valid JSON ({error}). Fix or remove the line: each is one whole object"
            raise InputError(f'{fact}, unless the format is "json" and the file one array') from None


def _json(stream: IO[bytes], where: str) -> Iterator[Record]:
    """One array of objects, or lines."""
    lines = iter(stream)
    first = next((line for line in lines if line.strip(_BLANKS)), b"")
    if not first.lstrip(_BLANKS).startswith(b"["):
        yield from _json_lines(chain([first], lines), where)
        return
    try:
        found = parsed((first + b"".join(lines)).decode("utf-8-sig"))
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({error}). Fix it, or write one object a line") from None
    for number, one in enumerate(found, 1):
        yield _an_object(one, f"{where}, element {number}")


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
                    count = f"{'more' if None in row else 'fewer'} fields than the header's"
                    fact = f"{where}, line {rows.line_num}: {count} {len(rows.fieldnames or [])}"
                    raise InputError(f"{fact}. Fix or remove the line")
                yield row
        except UnicodeDecodeError as error:
            raise InputError(f"{where}, after line {rows.line_num}: not UTF-8 ({error}). Write it in UTF-8") from None
        except csv.Error as error:
            raise InputError(f"{where}, line {rows.reader.line_num}: not valid CSV ({error}). Fix the line") from None


_READERS: Mapping[str, Callable[[IO[bytes], str], Iterator[Record]]] = {
    "jsonl": _json_lines, "json": _json, "csv": _csv, "tsv": lambda stream, where: _csv(stream, where, "\t")
}  # fmt: skip
