"""SampleRows of JSONL, JSON and Parquet files in batches, and their columns: a value of another type is refused."""

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from storage.errors import InputError
from storage.ownership.scratch import scratch
from storage.schema import TURN
from tasks.data.files import check_different, fetched, form_of, objects, opened_parquet, path_of, reading
from tasks.data.values import shown, text_of

_ROWS = 8192
_FORMS = ("jsonl", "json", "parquet")

_NOT_STORABLE = (OverflowError, UnicodeError, pa.ArrowException)
"""Errors of Arrow for an integer beyond 64 bits, or a text that is not UTF-8."""
_INT, _FLOAT, _TEXT = pa.int64(), pa.float64(), pa.string()
_SCORED, _NAMED = frozenset([int, float, bool]), frozenset([str, int])


@dataclass(frozen=True)
class FileRows:
    file: str
    first: int  # SampleRows of the file before these
    names: tuple[str, ...]  # columns that the file has
    columns: Mapping[str, pa.Array | Sequence[Any]]
    """Wanted columns: of Parquet in its types, of JSON in those of each value."""
    rows: int


@dataclass(frozen=True)
class Local:
    """A file, copied to this machine if it is elsewhere."""

    file: str  # name given by the user
    path: Path
    form: str

    def batches(self, wanted: Collection[str]) -> Iterator[FileRows]:
        """Batches with the wanted columns. Raises InputError: it cannot be read."""
        with reading(self.file, f" as {self.form}"):
            yield from (self._parquet if self.form == "parquet" else self._objects)(wanted)

    def _parquet(self, wanted: Collection[str]) -> Iterator[FileRows]:
        with opened_parquet(self.path, self.file) as parquet:
            names, first = tuple(parquet.schema_arrow.names), 0
            check_different(names, self.file, "the table")
            for batch in parquet.iter_batches(_ROWS, columns=[name for name in names if name in wanted]):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                yield FileRows(self.file, first, names, columns, batch.num_rows)
                first += batch.num_rows

    def _objects(self, wanted: Collection[str]) -> Iterator[FileRows]:
        first = 0
        for rows in itertools.batched(objects(self.path, self.form, self.file), _ROWS):
            names = tuple(dict.fromkeys(name for row in rows for name in row))
            columns = {name: [row.get(name) for row in rows] for name in names if name in wanted}
            yield FileRows(self.file, first, names, columns, len(rows))
            first += len(rows)


@contextmanager
def local_files(files: Sequence[str]) -> Iterator[list[Local]]:
    """Local copies while the block lasts. Raises InputError: a file has another form, is named twice or is missing."""
    places = [file if "://" in file else os.path.realpath(file) for file in files]
    twice = next((file for file, place in zip(files, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice, so its samples would be there twice: name it once")
    with scratch() as folder:
        yield [_local(file, folder / str(number)) for number, file in enumerate(files)]


def _local(file: str, folder: Path) -> Local:
    if (form := form_of(path_of(file))) not in _FORMS:
        raise InputError(f"{file} cannot be imported: give files that end with .jsonl, .json or .parquet")
    folder.mkdir()
    there = fetched(file, file, folder)
    if len(there) > 1:
        raise InputError(f"{file} names {len(there)} files: name each by itself, since each becomes an iteration")
    return Local(file, there[0], form)


@dataclass(frozen=True)
class Kind:
    """Values that a column may have."""

    words: str
    wide: pa.DataType  # wide enough for all of them
    values: frozenset[type]  # their types in JSON; in a column of lists, those of the elements
    columns: Callable[[pa.DataType], bool]
    """True for a type that a column of Parquet, or the elements of its lists, may have."""
    listed: bool = False
    optional: bool = False  # a value may be null
    alone: bool = False  # a value without a list is one for all tokens: it becomes a list of one


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


_TOKENS = Kind("a list of integers", pa.list_(_INT), frozenset([int]), pa.types.is_integer, listed=True)
_SCORE = Kind(
    "a number, a truth value or null", _FLOAT, _SCORED, lambda t: _is_number(t) or pa.types.is_boolean(t), optional=True
)
_NAME = Kind("a text or an integer", _TEXT, _NAMED, lambda t: _is_text(t) or pa.types.is_integer(t))
_INTEGER = Kind("an integer", _INT, frozenset([int]), pa.types.is_integer)
_VERSIONS = Kind(
    "an integer or a list of integers", pa.list_(_INT), frozenset([int]), pa.types.is_integer, listed=True, alone=True
)
_TRUTHS = Kind("a list of truth values", pa.list_(pa.bool_()), frozenset([bool]), pa.types.is_boolean, listed=True)
_NUMBER = Kind("a number", _FLOAT, frozenset([int, float]), _is_number)

KINDS = {
    "prompt_tokens": _TOKENS,
    "response_tokens": _TOKENS,
    "logprobs": Kind("a list of numbers", pa.list_(_FLOAT), frozenset([int, float]), _is_number, listed=True),
    "reward": _SCORE,
    "prompt_id": _NAME,
    "sample_id": _INTEGER,
    "finish_reason": Kind("a text", _TEXT, frozenset([str]), _is_text),
    "weight_version": _VERSIONS,
    "sampled": _TRUTHS,
    "turns": Kind("a list of turns", pa.list_(TURN), frozenset([dict]), pa.types.is_struct, listed=True),
    "seed": _INTEGER,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
}  # properties of a sample


@dataclass(frozen=True)
class Column:
    batch: FileRows
    name: str  # property of a sample
    called: str  # its name in the file

    def array(self) -> pa.Array:
        """Values in the wide type of their kind. Raises InputError, with the sample: one is null or of another kind."""
        found = self.batch.columns[self.called]
        made = self._of_column(found) if isinstance(found, pa.Array) else self._of_values(found)
        if not KINDS[self.name].optional:
            self.refuse(made.is_null().to_numpy(zero_copy_only=False), "is null")
        if pa.types.is_list(made.type):
            self.refuse(any_of(made, made.flatten().is_null().to_numpy(zero_copy_only=False)), "holds a null")
        return made

    def refuse(self, wrong: NDArray[np.bool_], fact: str) -> None:
        """Raises InputError if a row is wrong: (N,)."""
        if wrong.any():
            raise self.error(int(np.argmax(wrong)), fact)

    def error(self, row: int, fact: str) -> InputError:
        """An error that names one of these rows."""
        mapped = "" if self.called == self.name else f" (column {self.called!r})"
        place = f"{self.batch.file}, sample {self.batch.first + row + 1}"
        return InputError(f"{place}: {self.name}{mapped} {fact}. Correct the file, or leave that sample out")

    def _of_values(self, values: Sequence[Any]) -> pa.Array:
        kind = KINDS[self.name]
        for row, value in enumerate(values):
            if value is not None and not _fits(value, kind):
                raise self.error(row, f"is {shown(value)}, but {kind.words} is expected")
        if kind.wide == _TEXT:
            values = [None if value is None else text_of(value) for value in values]
        elif kind.wide == _FLOAT:  # Arrow takes no mixture with truth values
            values = [int(value) if isinstance(value, bool) else value for value in values]
        elif kind.alone:
            values = [value if value is None or isinstance(value, list) else [value] for value in values]
        return self._stored(values, lambda some: pa.array(some, kind.wide))

    def _of_column(self, found: pa.Array) -> pa.Array:
        kind = KINDS[self.name]
        column = found.dictionary_decode() if isinstance(found, pa.DictionaryArray) else found
        if not _takes(column.type, kind):
            raise self.error(0, f"is of the type {column.type}, but {kind.words} is expected")
        if kind.alone and kind.columns(column.type):
            column = pa.FixedSizeListArray.from_arrays(column, 1)

        def made(some: pa.Array) -> pa.Array:
            cast = some.cast(kind.wide)
            if kind.wide == _TEXT:
                cast.validate(full=True)  # a file may hold bytes that are not UTF-8
            return cast

        return self._stored(column, made)

    def _stored[T: Sequence[Any] | pa.Array](self, values: T, make: Callable[[T], pa.Array]) -> pa.Array:
        try:
            return make(values)
        except _NOT_STORABLE:
            for row in range(len(values)):
                try:
                    make(values[row : row + 1])  # pyright: ignore[reportArgumentType] - a part of the same type
                except _NOT_STORABLE as error:
                    raise self.error(row, f"cannot be stored ({error})") from None
            raise


def any_of(lists: pa.Array, wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """True for each row with a wrong value: (sum of lengths,) -> (N,)."""
    rows = np.repeat(np.arange(len(lists)), lengths_of(lists))
    return np.bincount(rows[wrong], minlength=len(lists)) > 0


def lengths_of(lists: pa.Array) -> NDArray[np.int64]:
    return pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)  # pyright: ignore[reportAttributeAccessIssue]


def _fits(value: object, kind: Kind) -> bool:
    if kind.listed and not (kind.alone and type(value) in kind.values):
        return isinstance(value, list) and set(map(type, value)) <= kind.values
    return type(value) in kind.values


def _takes(found: pa.DataType, kind: Kind) -> bool:
    if pa.types.is_null(found):
        return True
    if not kind.listed or (kind.alone and kind.columns(found)):
        return kind.columns(found)
    listed = pa.types.is_list(found) or pa.types.is_large_list(found) or pa.types.is_fixed_size_list(found)
    return listed and (pa.types.is_null(found.value_type) or kind.columns(found.value_type))
