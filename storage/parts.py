"""Writing and reading the parts of a stage. An array never becomes a Python list here."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage import kill_points, layout
from storage.backends.root import Root
from storage.digest import bytes_digest, file_digest
from storage.errors import DigestMismatch, InputError, NotCommitted, PartMissing, StorageError
from storage.kill_points import Point
from storage.manifest import Manifest, Part
from storage.meter import measured
from storage.parallel import each
from storage.schema import check

_PARALLEL = 8
_MUCH = 1 << 26  # bytes
_BATCH_ROWS = 1024  # rows of a record batch: 64 groups of 16 samples, 10 MB at 1,000 tokens each


@dataclass(frozen=True)
class PartWriter:
    """Writes the parts of one stage; the caller publishes the manifest that names them later."""

    root: Root
    run: str
    iteration: int
    stage: str
    revision: int = 0  # revision of the manifest; parts of equal content are shared between revisions

    @property
    def manifest_key(self) -> str:
        return layout.manifest_key(self.run, self.iteration, self.stage, self.revision)

    @measured()
    def write_bytes(self, name: str, data: bytes | pa.Buffer, rows: int | None = None) -> Part:
        """Store `data`. Equal content has an equal key, so writing it again is harmless."""
        part = self._part(name, bytes_digest(data), len(memoryview(data)), rows)
        if not self.root.put_if_absent(part.key, data) and not self._adopted(part):
            self.root.replace(part.key, data)
        return part

    @measured()
    def write_table(self, name: str, table: pa.Table, schema: pa.Schema, compression: str | None = "zstd") -> Part:
        """Store a table as an Arrow IPC file; equal tables give equal bytes, however they are chunked. Raises
        SchemaMismatch if the table does not have `schema`."""
        check(table.schema, schema, name)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table.combine_chunks(), max_chunksize=_BATCH_ROWS)
        return self.write_bytes(name, sink.getvalue(), table.num_rows)

    @measured()
    def store_file(self, part: Part, path: Path) -> None:
        """Store a described local file. It is handed over: on local storage it may become the part itself. Raises
        StorageError if it differs from its description, or changed while it was stored."""
        before = path.stat()
        if file_digest(path) != (part.digest, part.bytes):
            raise StorageError(f"{path} changed before it was stored as {part.key}: finish writing it first")
        stored = self.root.put_file_if_absent(part.key, path)
        after = path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise StorageError(f"{path} changed while it was stored as {part.key}: finish writing it first")
        if not stored and not self._adopted(part):
            self.root.replace(part.key, path.read_bytes())

    @measured()
    def write_files(self, folder: Path, names: Sequence[str], prefix: str = "") -> tuple[Part, ...]:
        """Store the files of a folder, several at a time; `prefix` is that of `describe_files`."""
        parts = self.describe_files(folder, names, prefix)
        self.store_files(folder, parts, prefix)
        return parts

    @measured()
    def describe_files(self, folder: Path, names: Sequence[str], prefix: str = "") -> tuple[Part, ...]:
        """The parts that files will become; stores nothing. `prefix` is added to the names of the parts, but not to the
        file names or their keys."""
        # threads only pay off when there is much to read
        threads = _PARALLEL if sum((folder / name).stat().st_size for name in names) > _MUCH else 1
        parts = each(lambda name: self._part(name, *file_digest(folder / name)), names, threads)
        return tuple(part.model_copy(update={"name": prefix + part.name}) for part in parts)

    @measured()
    def store_files(self, folder: Path, parts: Sequence[Part], prefix: str = "") -> None:
        """Store files described with the same folder and prefix; otherwise, and in what it raises, as `store_file`. The
        smallest one goes first and alone, so that `Point.UPLOAD` is a moment at which some are stored, but not all."""

        def store(part: Part) -> None:
            self.store_file(part, folder / part.name.removeprefix(prefix))

        smallest = sorted(parts, key=lambda part: part.bytes)
        each(store, smallest[:1], threads=1)
        if others := smallest[1:]:
            kill_points.reached(Point.UPLOAD, smallest[0].key)
            each(store, others, _PARALLEL)

    def _adopted(self, part: Part) -> bool:
        """True if the part that an earlier attempt left under the key can be used as it is. It gets the age of a new
        part: until the manifest is published, nothing else protects it from gc. The content is compared after that,
        because gc may have been faster."""
        return self.root.touch(part.key) and is_intact(self.root, part)

    def _part(self, name: str, digest: str, size: int, rows: int | None = None) -> Part:
        if flaw := layout.name_flaw(name):
            raise InputError(f"{name!r} cannot be stored under this name: {flaw}. Rename it")
        key = layout.part_key(self.run, self.iteration, self.stage, name, digest)
        return Part(name=name, key=key, bytes=size, digest=digest, rows=rows)


def read_part(root: Root, part: Part) -> bytes:
    """The bytes of a part. Raises DigestMismatch if they are not what is recorded, PartMissing if it is gone."""
    return read_part_buffer(root, part).to_pybytes()


@measured()
def read_part_buffer(root: Root, part: Part) -> pa.Buffer:
    """Like `read_part`, without a copy where the storage is local."""
    try:
        data = root.read_buffer(part.key)
    except NotCommitted:
        raise _missing(root, part) from None
    _compare(part, bytes_digest(data), root)
    return data


def is_intact(root: Root, part: Part) -> bool:
    try:
        read_part_buffer(root, part)
    except (DigestMismatch, PartMissing):
        return False
    return True


def read_table(root: Root, manifest: Manifest, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """All table parts of a stage in the manifest's order, verified. Raises DigestMismatch if a part was damaged,
    SchemaMismatch if a part has another schema."""
    return read_parts(root, manifest.tables, schema, columns)


@measured()
def read_parts(root: Root, parts: Sequence[Part], schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Table parts in the given order, verified; raises as `read_table`."""
    names = schema.names if columns is None else list(columns)
    tables = [open_table(read_part_buffer(root, part), schema, part.key, names) for part in parts]
    return pa.concat_tables(tables) if tables else schema.empty_table().select(names)


def open_table(data: pa.Buffer, schema: pa.Schema, where: str, names: Sequence[str]) -> pa.Table:
    """Columns `names` of an Arrow IPC file in memory. Raises SchemaMismatch if the file has another schema."""
    check(pa.ipc.open_file(data).schema, schema, where)
    options = None
    if set(names) != set(schema.names):  # the others are not decompressed
        fields = [schema.names.index(name) for name in names]
        # more threads would take up to six times the processor for the few buffers of a part
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    return (
        pa.ipc.open_file(data, options=options).read_all().select(list(names)).replace_schema_metadata(schema.metadata)
    )


@measured()
def materialize(
    root: Root, manifest: Manifest, folder: Path, prefix: str = "", wanted: Callable[[str], bool] | None = None
) -> Path:
    """Fetch the parts whose name starts with `prefix` into `folder` under their names without it, verified. A part that
    is already there with the right digest is not fetched again; a symbolic link is replaced. `wanted` says of a name
    (without the prefix) whether it is needed; by default all are. Raises DigestMismatch or PartMissing if a part was
    damaged, or is gone; StorageError if a symbolic link in the folder leads out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder.resolve()
    named = manifest.below(prefix)
    needed = [name for name in named if wanted is None or wanted(name)]
    each(lambda name: _fetch(root, named[name], place, name), needed, _PARALLEL)
    return folder


def _fetch(root: Root, part: Part, folder: Path, name: str) -> None:
    """Fetch a part into `folder`, which must be a path without symbolic links."""
    target = folder / name
    if layout.name_flaw(name) or not target.parent.resolve().is_relative_to(folder):
        raise StorageError(f"{name!r} leads out of {folder}: an invalid name, or a symbolic link. Use an empty folder")
    if not target.is_symlink() and target.exists() and file_digest(target)[0] == part.digest:
        return
    target.unlink(missing_ok=True)
    try:
        root.download(part.key, target)
    except NotCommitted:
        raise _missing(root, part) from None
    _compare(part, file_digest(target)[0], root)


def _missing(root: Root, part: Part) -> PartMissing:
    return PartMissing(
        f"{root.url}/{part.key} is named by a manifest and is not there: retention deleted it, or it was lost "
        "(`ratchet verify` shows which). Go back to an iteration that is kept, or restore the object"
    )


def _compare(part: Part, digest: str, root: Root) -> None:
    if digest != part.digest:
        fact = f"{root.url}/{part.key} is damaged: xxh3-128 {digest} was read, {part.digest} was written"
        raise DigestMismatch(f"{fact}. Restore the object, or do the stage again")


def flat(column: pa.ChunkedArray) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """The values of a list column, (sum of lengths,), not copied if it has one chunk and no truth values, which Arrow
    stores as bits, and (rows + 1,) int64 offsets from 0."""
    chunks = [_values(chunk) for chunk in column.chunks if len(chunk)]
    if not chunks:
        return np.empty(0, column.type.value_type.to_pandas_dtype()), np.zeros(1, np.int64)
    lengths = np.concatenate([np.diff(offsets) for _, offsets in chunks])
    values = chunks[0][0] if len(chunks) == 1 else np.concatenate([values for values, _ in chunks])
    return values, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def list_column(rows: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.ListArray:
    """A list column with one row per array, of elements of this type. There is at least one row."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows), kind))


def row_views(column: pa.ChunkedArray) -> list[NDArray[Any]]:
    """One read-only array per row of a list column, each a view of the column's own memory."""
    views: list[NDArray[Any]] = []
    for chunk in column.chunks:
        values, offsets = _values(chunk)
        bounds = offsets.tolist()
        views += [values[start:stop] for start, stop in itertools.pairwise(bounds)]
    return views


def _values(chunk: pa.ListArray) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    # the offsets of a slice do not start at 0, and `values` ignores the slice
    offsets = chunk.offsets.to_numpy()
    values = chunk.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])) if len(offsets) else chunk.values
    return values.to_numpy(zero_copy_only=not pa.types.is_boolean(values.type)), (offsets - offsets[0]).astype(np.int64)
