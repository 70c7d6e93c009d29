"""Tables as arrays: views of the stored memory, row by row, and never a list."""

import itertools
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from storage.parts import PartWriter, flat, row_views
from storage.schema import ROLLOUT
from tasks.stages.names import Stage
from tests.storage.tables import list_column, manifest, read_stored_table, rollout_table

LISTS = ("prompt_tokens", "response_tokens", "logprobs")
RANDOM = np.random.default_rng(0)


def stored(root, *tables, compression="zstd"):
    writer = PartWriter(root, "run", 1, Stage.ROLLOUT)
    written = (writer.write_table(f"groups-{n}.arrow", table, ROLLOUT, compression) for n, table in enumerate(tables))
    return manifest(parts=tuple(written))


def test_the_parts_themselves_say_which_table_they_are(any_root):
    tables = [rollout_table(seed=seed) for seed in range(2)]
    stage = stored(any_root, *tables)
    assert read_stored_table(any_root, stage).equals(pa.concat_tables(tables))
    assert read_stored_table(any_root, stage, ["seed"]).schema.names == ["seed"]


@pytest.mark.parametrize("slices", [[(0, 12)], [(0, 5), (5, 7)], [(3, 4), (7, 0), (7, 5)]], ids=len)
def test_rows_are_views_with_the_values_of_the_table(slices):
    table = rollout_table()
    column = pa.chunked_array([table["logprobs"].chunk(0).slice(start, count) for start, count in slices])
    expected = column.to_pylist()
    views = row_views(column)
    assert [view.tolist() for view in views] == expected
    assert not any(view.flags.owndata or view.flags.writeable for view in views)
    values, offsets = flat(column)
    assert [values[a:b].tolist() for a, b in itertools.pairwise(offsets)] == expected
    assert (values.dtype, offsets.dtype) == (np.float32, np.int64)


def test_truth_values_are_read_too():
    column = pa.chunked_array([pa.array([[True, False], [], [True]]).slice(1)])
    assert [view.tolist() for view in row_views(column)] == [[], [True]]
    assert flat(column)[0].tolist() == [True]


def test_an_empty_column_is_flat_too():
    values, offsets = flat(pa.chunked_array([], pa.list_(pa.int32())))
    assert (values.shape, values.dtype, offsets.tolist()) == ((0,), np.int32, [0])


def test_views_of_stored_rows_copy_nothing(root):
    stage = stored(root, rollout_table(300), compression=None)
    before = pa.total_allocated_bytes()
    columns = [
        row_views(read_stored_table(root, stage)[name]) for name in ("prompt_tokens", "response_tokens", "logprobs")
    ]
    assert pa.total_allocated_bytes() - before < 10_000
    assert [len(views) for views in columns] == [900] * 3


ROWS, LENGTH = 2000, 300
READERS = {  # and the memory besides Arrow's that each may take, as a share of the table
    "as a table": (lambda root, stage: read_stored_table(root, stage), 0.02),
    "flat": (lambda root, stage: [flat(read_stored_table(root, stage)[name]) for name in LISTS], 1.02),  # two chunks
    "as views": (lambda root, stage: [row_views(read_stored_table(root, stage)[name]) for name in LISTS], 0.15),
}


@pytest.mark.parametrize(("read", "share"), READERS.values(), ids=READERS)
@pytest.mark.parametrize("compression", ["zstd", None])
def test_no_number_that_is_read_becomes_an_object(root, read, share, compression):
    table = rollout_table(ROWS // 4, 4)
    for name in LISTS:
        column = list_column(np.full(ROWS, LENGTH), table.schema.field(name).type.value_type.to_pandas_dtype(), RANDOM)
        table = table.set_column(ROLLOUT.get_field_index(name), ROLLOUT.field(name), column)
    stage = stored(root, table, compression=compression)
    read(root, stage)  # imports and caches do not count
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    result = read(root, stage)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < share * table.nbytes  # one column as a list takes three times the table
    assert pa.total_allocated_bytes() - arrow < (10_000 if compression is None else 1.5 * table.nbytes)
    del result
