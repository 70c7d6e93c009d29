"""The Parquet archive holds every sample with its own score."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import InputError
from storage.ownership.scratch import sweep
from storage.schema import ROLLOUT
from storage.upkeep.archive import SAMPLES, compact, compact_new
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.runs import make_iteration, make_run, put
from tests.storage.tables import read_stored_table, rollout_table

PROJECT = Path(__file__).resolve().parents[3]


def read(root, archive):
    return pq.ParquetFile(pa.py_buffer(root.read_bytes(archive.key)))


def test_every_sample_is_there_with_its_score(any_root):
    manifests = make_run(any_root)
    archive = compact(any_root, WORKFLOW, "run")
    table = read(any_root, archive).read()
    stored = pa.concat_tables(read_stored_table(any_root, manifests[n, Stage.ROLLOUT]) for n in (1, 2, 3))
    assert table.select(ROLLOUT.names).cast(stored.schema).equals(stored)
    expected = [None if sample == 1 else sample / 4 for sample in stored["sample_id"].to_pylist()]
    assert table["reward"].to_pylist() == expected
    assert (archive.rows, archive.iterations, archive.bytes) == (36, (1, 3), len(any_root.read_bytes(archive.key)))
    assert table.schema.field("logprobs").metadata[b"unit"] == b"nat"


def test_the_columns_are_encoded_as_measured(root):
    make_run(root)
    group = read(root, compact(root, WORKFLOW, "run")).metadata.row_group(0)
    columns = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in columns["logprobs.list.element"].encodings
    assert "RLE_DICTIONARY" not in columns["logprobs.list.element"].encodings
    assert "RLE_DICTIONARY" in columns["response_tokens.list.element"].encodings


def test_the_same_content_is_the_same_file(root):
    make_run(root)
    assert compact(root, WORKFLOW, "run") == compact(root, WORKFLOW, "run")
    assert len(root.keys("run/archive")) == 1
    make_iteration(root, "run", 4)
    assert compact(root, WORKFLOW, "run").rows == 48
    assert len(root.keys("run/archive")) == 1, "so a reader of all files there counts no sample twice"


def test_a_rollout_that_was_not_scored_yet_has_no_scores(root):
    make_run(root, iterations=1)
    put(root, "run", 2, Stage.ROLLOUT, {}, rollout_table(), ROLLOUT)
    table = read(root, compact(root, WORKFLOW, "run")).read()
    assert table.slice(12)["reward"].null_count == table.slice(12)["status"].null_count == 12
    assert table.schema.names == SAMPLES.names


def test_a_run_without_rollouts_has_no_archive(root):
    make_run(root, iterations=0)
    with pytest.raises(InputError, match="no rollout yet"):
        compact(root, WORKFLOW, "run")


@pytest.mark.slow
def test_an_archive_takes_the_place_of_the_one_before(root):
    make_run(root, iterations=2)
    compact_new(root, WORKFLOW, "run")
    chunk = root.keys("run/archive")
    compact(root, WORKFLOW, "run")
    make_iteration(root, "run", 3)
    archive = compact(root, WORKFLOW, "run")
    assert root.keys("run/archive") == [*chunk, archive.key]
    assert compact(root, WORKFLOW, "run") == archive
    assert root.keys("run/archive") == [*chunk, archive.key]


KILLED = """
import os, signal, sys, tempfile
from storage import kill_points
from storage.backends.root import open_root
from storage.upkeep.archive import compact
from storage.upkeep.fork import branch
from storage.upkeep.archive import compact_new
from tasks.stages.names import WORKFLOW
from tests.storage.runs import DOCUMENT
folder = sys.argv[2]
tempfile.tempdir = f"{folder}/temporary"
os.mkdir(tempfile.tempdir)
root, other = open_root(f"{folder}/runs"), open_root(f"{folder}/other")
work = {
    "compact": lambda: compact(root, WORKFLOW, "run"),
    "chunks": lambda: compact_new(root, WORKFLOW, "run"),
    "branch": lambda: branch(root, WORKFLOW, "run", 2, other, "new", "c", DOCUMENT),
}
with kill_points.observed(lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
    work[sys.argv[1]]()
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", ["compact", "chunks", "branch"])
def test_what_a_killed_process_left_in_the_temporary_folder_is_removed_by_the_next(root, tmp_path, work, monkeypatch):
    make_run(root, iterations=2)
    ended = subprocess.run([sys.executable, "-c", KILLED, work, str(tmp_path)], cwd=PROJECT, check=False)
    assert ended.returncode == -9
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (left,) = (tmp_path / "temporary").iterdir()
    assert left in sweep()
    assert not left.exists()
