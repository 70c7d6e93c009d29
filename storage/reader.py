"""Reading the stored tables of a stage as arrays, checked against their digests. Nothing becomes a Python list."""

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.backends.root import Root
from storage.errors import StorageError
from storage.manifest import Manifest
from storage.parts import open_table, read_part_buffer
from storage.schema import stored_schema


def read_stored_table(root: Root, manifest: Manifest, columns: Sequence[str] | None = None) -> pa.Table:
    """All table parts of a stage in the manifest's order, in the schema that the parts name. Raises DigestMismatch if a
    part was damaged, PartMissing if a part is gone, SchemaMismatch if a part has another schema than its table,
    StorageError if the stage has no table parts."""
    tables = []
    for part in manifest.parts:
        if part.rows is not None:
            data = read_part_buffer(root, part)
            schema = stored_schema(pa.ipc.open_file(data).schema, part.key)
            tables.append(open_table(data, schema, part.key, columns or schema.names))
    if not tables:
        raise StorageError(f"{manifest.stage} of iteration {manifest.iteration} of run {manifest.run} has no table")
    return pa.concat_tables(tables)


def flat(column: pa.ChunkedArray) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """The values of a list column, (sum of lengths,), not copied if it has one chunk and no truth values, which Arrow
    stores as bits, and (rows + 1,) int64 offsets from 0."""
    chunks = [_values(chunk) for chunk in column.chunks if len(chunk)]
    if not chunks:
        return np.empty(0, column.type.value_type.to_pandas_dtype()), np.zeros(1, np.int64)
    lengths = np.concatenate([np.diff(offsets) for _, offsets in chunks])
    values = chunks[0][0] if len(chunks) == 1 else np.concatenate([values for values, _ in chunks])
    return values, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def row_views(column: pa.ChunkedArray) -> list[NDArray[np.generic]]:
    """One read-only array per row of a list column, each a view of the column's own memory."""
    views: list[NDArray[np.generic]] = []
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
