"""Records of prompt sources: files in JSONL, CSV or Parquet on any fsspec filesystem, and data sets of the hub.

Records are read one after another, so a large source never is in memory as a whole.
"""

import csv
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet
from fsspec.utils import infer_compression

from storage.digest import file_digest, value_digest
from storage.errors import InputError
from tasks.config.credentials import referenced
from tasks.config.data import DataSource
from tasks.config.environment import resolve, without_secrets
from tasks.data import hub_rows

Record = Mapping[str, Any]

_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_FORMS = "JSONL, CSV or Parquet"
_PARQUET_ROWS = 1024
_UNREADABLE = (OSError, ImportError, ValueError, EOFError)


@dataclass(frozen=True)
class Opened:
    """A source that can be read."""

    digest: str
    """Identity of its content."""
    records: Callable[[], Iterator[Record]]
    """Its records, from the first; raises InputError where one cannot be read."""


@contextmanager
def opened(source: DataSource, download: bool = False) -> Iterator[Opened]:
    """A source, with its files on this machine while the block lasts.

    Args:
        source: its `source` may be a reference (`env:NAME`).
        download: whether a data set of the hub may be downloaded.

    Raises:
        InputError: it does not exist or cannot be read.
    """
    address = str(resolve(source.source, "the URL of a dataset"))
    if hub_rows.is_id(address) and source.format is None and _suffix(address) is None and not Path(address).exists():
        rows = hub_rows.rows(source, address, download)
        yield Opened(hub_rows.digest(rows), lambda: hub_rows.records(rows))
        return
    with tempfile.TemporaryDirectory(prefix="ratchet-data-") as folder:
        files = _fetched(source.source, address, Path(folder))
        digests = [file_digest(file)[0] for file in files]
        whole = digests[0] if len(digests) == 1 else value_digest(digests)
        yield Opened(whole, lambda: _records(source, address, files))


def state(source: DataSource) -> str:
    """What a source looks like without being read: changes whenever its files do, as far as their filesystem says."""
    try:
        address = str(resolve(source.source, "the URL of a dataset"))
        fs, path = fsspec.core.url_to_fs(address)
        return value_digest([address, *(fs.ukey(one) for one in _matching(fs, path))])
    except (*_UNREADABLE, NotImplementedError, InputError):
        return value_digest([source.source])


def name_of(source: DataSource) -> str:
    """What goes before the ids of a source's prompts; by default the end of its address without suffix."""
    if source.name is not None:
        return source.name
    address = referenced(source.source) or hub_rows.without_revision(source.source)
    parts = [part for part in address.partition("?")[0].split("/") if part and "*" not in part and "[" not in part]
    return parts[-1].partition(".")[0] or parts[-1] if parts else address


def _fetched(shown: str, address: str, folder: Path) -> list[Path]:
    """The local files of an address; those of another machine are copied into `folder`."""
    try:
        fs, path = fsspec.core.url_to_fs(address)
        names = _matching(fs, path)
        if not names:
            raise InputError(_missing(shown))
        if any(fs.isdir(name) for name in names):
            raise InputError(
                f"dataset {shown} is a folder: name its files by a pattern, such as {shown.rstrip('/')}/*.jsonl"
            )
        if "file" in fs.protocol:
            return [Path(name) for name in names]
        return [_copied(fs, name, folder / f"{number:05d}-{_plain(name)}") for number, name in enumerate(names)]
    except FileNotFoundError:
        raise InputError(_missing(shown)) from None
    except _UNREADABLE as error:
        raise InputError(f"dataset {shown} cannot be read: {without_secrets(str(error))}") from None


def _missing(shown: str) -> str:
    both = " (no such file, and no data set of the hub: that needs org/name and a split)" if "/" in shown else ""
    return f"dataset {shown} does not exist{both}: give the path or URL of a {_FORMS} file, or a pattern that fits some"


def _matching(fs: Any, path: str) -> list[str]:
    """The files of a path or pattern, in the order of their names. In http addresses `?` and `[` have other uses."""
    if "http" in fs.protocol or not any(sign in path for sign in "*?[") or fs.exists(path):
        return [path] if fs.exists(path) else []
    return sorted(str(name) for name in fs.glob(path))


def _copied(fs: Any, name: str, place: Path) -> Path:
    fs.get_file(name, str(place))
    return place


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(name.partition("?")[0]).name)[-80:]


def _suffix(name: str) -> str | None:
    """What the end of a name says about the form of a file."""
    path = PurePosixPath(name.partition("?")[0])
    return _SUFFIXES.get((path.with_suffix("") if path.suffix in _PACKED else path).suffix)


def _records(source: DataSource, address: str, files: list[Path]) -> Iterator[Record]:
    shown = source.source
    for file in files:
        where = f"dataset {shown}" + (f", {file.name}" if len(files) > 1 else "")
        form = source.format or _suffix(file.name) or _suffix(address) or "jsonl"
        try:
            yield from _READERS[form](file, where)
        except _UNREADABLE as error:
            raise InputError(f"{where} cannot be read as {form}: {without_secrets(str(error))}") from None


@contextmanager
def _unpacked(file: Path) -> Iterator[IO[bytes]]:
    with fsspec.open(str(file), "rb", compression=infer_compression(file.name)) as stream:
        yield stream  # pyright: ignore[reportReturnType]


def _jsonl(file: Path, where: str) -> Iterator[Record]:
    with _unpacked(file) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise InputError(f"{where}, line {number}: not valid JSON ({error}). Fix or remove the line") from None
            if not isinstance(record, dict):
                raise InputError(f"{where}, line {number}: a {type(record).__name__} where an object is expected")
            yield record


def _csv(file: Path, where: str) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)  # a prompt may be longer than the default of 128 KiB
    with _unpacked(file) as stream, TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        rows = csv.DictReader(text, delimiter="\t" if ".tsv" in file.name else ",", strict=True)
        try:
            for row in rows:
                if None in row or None in row.values():
                    count = (
                        f"{'more' if None in row else 'fewer'} fields than the header's {len(rows.fieldnames or [])}"
                    )
                    raise InputError(f"{where}, line {rows.line_num}: {count}. Fix or remove the line")
                yield row
        except csv.Error as error:
            raise InputError(f"{where}, line {rows.reader.line_num}: not valid CSV ({error}). Fix the line") from None


def _parquet(file: Path, where: str) -> Iterator[Record]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(_PARQUET_ROWS):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise InputError(f"{where} is not a Parquet file: {error}. Set its format") from None


_READERS: Mapping[str, Callable[[Path, str], Iterator[Record]]] = {"jsonl": _jsonl, "csv": _csv, "parquet": _parquet}
