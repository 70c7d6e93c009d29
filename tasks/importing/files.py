"""Rows of JSONL, JSON and Parquet files, in batches, each value with its type in the file."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage.errors import InputError
from storage.ownership.scratch import scratch
from tasks.data.files import fetched, path_of, reading
from tasks.data.forms import check_different, form_of, objects, opened_parquet

_ROWS = 8192
_FORMS = ("jsonl", "json", "parquet")


@dataclass(frozen=True)
class Batch:
    """Some rows of a file."""

    file: str
    first: int
    """Rows of the file before these."""
    names: tuple[str, ...]
    """Columns that the file has."""
    columns: Mapping[str, pa.Array | Sequence[Any]]
    """Wanted columns: of Parquet in its types, of JSON in those of each value."""
    rows: int


@dataclass(frozen=True)
class Local:
    """A file, copied to this machine if it is elsewhere."""

    file: str
    """Name given by the user."""
    path: Path
    form: str

    def batches(self, wanted: Collection[str]) -> Iterator[Batch]:
        """Batches with the wanted columns.

        Raises:
            InputError: it cannot be read.
        """
        with reading(self.file, f" as {self.form}"):
            yield from (self._parquet if self.form == "parquet" else self._objects)(wanted)

    def _parquet(self, wanted: Collection[str]) -> Iterator[Batch]:
        with opened_parquet(self.path, self.file) as parquet:
            names, first = tuple(parquet.schema_arrow.names), 0
            check_different(names, self.file, "the table")
            for batch in parquet.iter_batches(_ROWS, columns=[name for name in names if name in wanted]):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                yield Batch(self.file, first, names, columns, batch.num_rows)
                first += batch.num_rows

    def _objects(self, wanted: Collection[str]) -> Iterator[Batch]:
        first = 0
        for rows in itertools.batched(objects(self.path, self.form, self.file), _ROWS):
            names = tuple(dict.fromkeys(name for row in rows for name in row))
            columns = {name: [row.get(name) for row in rows] for name in names if name in wanted}
            yield Batch(self.file, first, names, columns, len(rows))
            first += len(rows)


@contextmanager
def local_files(files: Sequence[str]) -> Iterator[list[Local]]:
    """Local copies of files, by path or URL, for the duration of the block.

    Raises:
        InputError: one is of another form, is named twice or does not exist.
    """
    twice = next((file for file in files if files.count(file) > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice, so its samples would be there twice: name it once")
    with scratch() as folder:
        yield [_local(file, folder / str(number)) for number, file in enumerate(files)]


def _local(file: str, folder: Path) -> Local:
    form = form_of(path_of(file))
    if form not in _FORMS:
        raise InputError(f"{file} cannot be imported: give files that end with .jsonl, .json or .parquet")
    folder.mkdir()
    there = fetched(file, file, folder)
    if len(there) > 1:
        raise InputError(f"{file} names {len(there)} files: name each by itself, since each becomes an iteration")
    return Local(file, there[0], form)
