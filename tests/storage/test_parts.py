"""Parts: write-once, verified, repaired when written again, and read in older schemas."""

import os
import re
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage import kill_points, layout
from storage.errors import DigestMismatch, InputError, PartMissing, SchemaMismatch, StorageError
from storage.kill_points import Point
from storage.parts import PartWriter, flat, is_intact, materialize, read_part, read_parts, read_table
from storage.schema import REWARD, ROLLOUT, fingerprint
from tasks.stages.names import Stage
from tests.storage.flaky import flaky_root
from tests.storage.hostile import forged_part
from tests.storage.tables import manifest, rollout_table


def writer(root, stage=Stage.ROLLOUT):
    return PartWriter(root, "run", 1, stage)


def damage(root, key, change):
    data = bytearray(root.read_bytes(key))
    root.replace(key, bytes(change(data)))


def flip(position):
    def change(data):
        data[position] ^= 0x10
        return data

    return change


def test_a_part_is_named_by_its_content(any_root):
    first = writer(any_root).write_bytes("part.bin", b"one")
    assert writer(any_root).write_bytes("part.bin", b"one") == first
    second = writer(any_root).write_bytes("part.bin", b"two")
    assert second.key != first.key
    assert (read_part(any_root, first), read_part(any_root, second)) == (b"one", b"two")
    assert first.key == f"run/parts/000001/rollout/part-{first.digest[:16]}.bin"


@pytest.mark.parametrize(
    "change", [flip(0), flip(-1), flip(1000), lambda data: data[:-1], lambda data: data + b"\0"], ids=range(5)
)
def test_a_part_that_changed_is_refused_with_its_key(any_root, change):
    table = rollout_table(40)
    part = writer(any_root).write_table("groups.arrow", table, ROLLOUT)
    damage(any_root, part.key, change)
    stage = manifest(parts=(part,))
    for read in (
        lambda: read_table(any_root, stage, ROLLOUT),
        lambda: read_part(any_root, part),
    ):
        with pytest.raises(DigestMismatch, match=part.key):
            read()
    assert not is_intact(any_root, part)


def test_a_damaged_file_is_not_brought_down(any_root, tmp_path):
    part = writer(any_root).write_bytes("part.bin", b"content")
    damage(any_root, part.key, flip(2))
    with pytest.raises(DigestMismatch, match=part.key):
        materialize(any_root, manifest(parts=(part,)), tmp_path / "scratch")


def test_a_part_that_is_gone_is_named(any_root, tmp_path):
    part = writer(any_root).write_bytes("part.bin", b"content")
    any_root.remove(part.key)
    with pytest.raises(PartMissing, match=part.key):
        read_part(any_root, part)
    with pytest.raises(PartMissing, match=part.key):
        materialize(any_root, manifest(parts=(part,)), tmp_path / "scratch")


@pytest.mark.parametrize("how", ["bytes", "file"])
def test_writing_a_part_again_repairs_it(any_root, tmp_path, how):
    (tmp_path / "part.bin").write_bytes(b"content" * 1000)

    def write():
        if how == "file":
            return writer(any_root).write_files(tmp_path, ["part.bin"])[0]
        return writer(any_root).write_bytes("part.bin", b"content" * 1000)

    part = write()
    damage(any_root, part.key, lambda data: data[:100])
    assert write() == part
    assert read_part(any_root, part) == b"content" * 1000


def test_a_torn_write_is_mended_by_the_next_try():
    root = flaky_root(["torn"])
    part = writer(root).write_bytes("part.bin", b"content" * 100)
    assert read_part(root, part) == b"content" * 100


def test_equal_tables_give_equal_parts_however_they_are_chunked(root):
    table = rollout_table(30)
    chunked = pa.concat_tables([table.slice(0, 7), table.slice(7, 50), table.slice(57)])
    parts = {writer(root).write_table("groups.arrow", one, ROLLOUT) for one in (table, chunked)}
    assert len(parts) == 1


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_tables_are_read_back_in_the_order_of_the_manifest(any_root, compression):
    tables = [rollout_table(seed=seed) for seed in range(3)]
    parts = tuple(
        writer(any_root).write_table(f"groups-{n}.arrow", table, ROLLOUT, compression) for n, table in enumerate(tables)
    )
    stage = manifest(parts=parts, schema_fingerprint=fingerprint(ROLLOUT))
    assert read_table(any_root, stage, ROLLOUT).equals(pa.concat_tables(tables))
    some = read_table(any_root, stage, ROLLOUT, ["logprobs", "prompt_id"])
    assert some.equals(pa.concat_tables(tables).select(["logprobs", "prompt_id"]))
    assert [part.rows for part in parts] == [12, 12, 12]


def test_a_stage_without_tables_reads_as_an_empty_one(root):
    assert read_parts(root, [], ROLLOUT, ["seed"]).schema.names == ["seed"]


def test_a_table_of_another_schema_is_not_written(root):
    table = rollout_table()
    wrong = table.set_column(6, "logprobs", table["logprobs"].cast(pa.list_(pa.float64())))
    with pytest.raises(SchemaMismatch, match="logprobs"):
        writer(root).write_table("groups.arrow", wrong, ROLLOUT)
    assert root.keys("") == []


def test_a_table_of_another_schema_is_not_read(root):
    part = writer(root).write_table("groups.arrow", rollout_table(), ROLLOUT)
    with pytest.raises(SchemaMismatch, match=part.key):
        read_parts(root, [part], REWARD)


def test_files_are_stored_and_brought_back_together(any_root, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    contents = {f"__{rank}_0.distcp": os.urandom(200_000) for rank in range(6)}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    parts = writer(any_root, Stage.TRAIN).write_files(source, sorted(contents))
    stage = manifest(Stage.TRAIN, parts=tuple(p.model_copy(update={"name": f"state/{p.name}"}) for p in parts))
    folder = materialize(any_root, stage, tmp_path / "scratch", "state/")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents


def test_files_can_be_described_first_and_stored_later(any_root, tmp_path):
    for name in ("0.distcp", "1.distcp"):
        (tmp_path / name).write_text(name * 100)
    described = writer(any_root, Stage.TRAIN).describe_files(tmp_path, ["0.distcp", "1.distcp"], "state/")
    assert any_root.keys("run") == []
    assert [part.name for part in described] == ["state/0.distcp", "state/1.distcp"]
    writer(any_root, Stage.TRAIN).store_files(tmp_path, described, "state/")
    assert [read_part(any_root, part).decode() for part in described] == ["0.distcp" * 100, "1.distcp" * 100]
    assert [part.key for part in writer(any_root, Stage.TRAIN).write_files(tmp_path, ["0.distcp", "1.distcp"])] == [
        part.key for part in described
    ]


def test_a_file_that_is_not_what_was_described_is_not_stored(any_root, tmp_path):
    (tmp_path / "0.distcp").write_bytes(b"described")
    parts = writer(any_root).describe_files(tmp_path, ["0.distcp"])
    (tmp_path / "0.distcp").write_bytes(b"Described")
    with pytest.raises(StorageError, match="changed before it was stored"):
        writer(any_root).store_files(tmp_path, parts)
    assert any_root.keys("run") == []


def test_a_scratch_file_that_is_right_stays_and_one_that_is_not_is_fetched_again(any_root, tmp_path):
    part = writer(any_root).write_bytes("part.bin", b"content")
    folder = materialize(any_root, manifest(parts=(part,)), tmp_path / "scratch")
    (folder / "part.bin").unlink()
    (folder / "part.bin").write_bytes(b"half")
    materialize(any_root, manifest(parts=(part,)), folder)
    assert (folder / "part.bin").read_bytes() == b"content"
    any_root.remove(part.key)
    materialize(any_root, manifest(parts=(part,)), folder)
    assert (folder / "part.bin").read_bytes() == b"content"


@pytest.mark.parametrize("position", [0, 1000], ids=["overwritten", "longer"])
@pytest.mark.parametrize("how", ["taken", "copied"])
def test_a_file_that_changes_while_it_is_stored_is_refused(root, tmp_path, how, position):
    source, changes = tmp_path / "state", []
    source.write_bytes(b"x" * 1000)
    os.utime(source, (0, 0))  # a filesystem's clock may not advance for some milliseconds
    if how == "copied":
        os.link(source, tmp_path / "known by another name too")
    with source.open("r+b") as file:

        def go_on_writing(*reached):
            changes.append(reached)
            file.seek(position)
            file.write(b"more")
            file.flush()

        with kill_points.observed(go_on_writing), pytest.raises(StorageError, match="changed while it was stored"):
            writer(root).write_files(source.parent, [source.name])
    assert [point for point, _ in changes] == [Point.MID_PART]


def test_a_file_that_nobody_writes_is_stored(root, tmp_path):
    (tmp_path / "state").write_bytes(b"x" * 1000)
    reached = []
    with kill_points.observed(lambda *one: reached.append(one)):
        writer(root).write_files(tmp_path, ["state"])
    assert [point for point, _ in reached] == [Point.MID_PART]


def test_at_the_point_upload_some_files_are_stored_but_not_all(root, tmp_path):
    names = [str(number) for number in range(4)]
    for name in names:
        (tmp_path / name).write_text(name * 100)
    stored = []

    def look(point, key):
        if point is Point.UPLOAD:
            time.sleep(0.05)  # long enough for other threads to store the rest
            stored.append(sum(not layout.is_temporary(one) for one in root.keys("run")))

    with kill_points.observed(look):
        writer(root).write_files(tmp_path, names)
    assert stored == [1]


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a\\b", ""])
def test_a_part_is_not_written_under_a_name_that_leaves_its_folder(root, name):
    with pytest.raises(InputError, match=re.escape(f"{name!r} cannot be stored under this name")):
        writer(root).write_bytes(name, b"content")
    assert root.keys("") == []


@pytest.mark.parametrize("name", ["..", "../victim", "state/../../victim", "/tmp/ratchet-victim"])
def test_a_part_is_not_brought_out_of_the_folder(root, tmp_path, name):
    part = writer(root).write_bytes("part.bin", b"content")
    folder, before = tmp_path / "scratch", set(tmp_path.rglob("*"))
    stage = manifest().model_copy(update={"parts": (forged_part(part, name=name),)})
    with pytest.raises(StorageError, match=re.escape(f"{name!r} leads out of {folder}")):
        materialize(root, stage, folder)
    assert set(tmp_path.rglob("*")) - before == {folder}
    assert not Path("/tmp/ratchet-victim").exists()


def test_no_symbolic_link_is_followed_out_of_the_folder(root, tmp_path):
    folder, outside = tmp_path / "scratch", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "state").symlink_to(outside)
    part = writer(root).write_bytes("state/part.bin", b"content")
    with pytest.raises(StorageError, match=f"'state/part.bin' leads out of {folder}.*symbolic link"):
        materialize(root, manifest(parts=(part,)), folder)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("content", [b"content", b"other"])
def test_a_symbolic_link_in_the_place_of_a_part_is_replaced(root, tmp_path, content):
    folder, outside = tmp_path / "scratch", tmp_path / "outside"
    folder.mkdir()
    outside.write_bytes(content)
    (folder / "part.bin").symlink_to(outside)
    part = writer(root).write_bytes("part.bin", b"content")
    materialize(root, manifest(parts=(part,)), folder)
    assert not (folder / "part.bin").is_symlink()
    assert ((folder / "part.bin").read_bytes(), outside.read_bytes()) == (b"content", content)


def test_a_folder_may_itself_be_a_symbolic_link(root, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "scratch").symlink_to(tmp_path / "real")
    part = writer(root).write_bytes("state/part.bin", b"content")
    folder = materialize(root, manifest(parts=(part,)), tmp_path / "scratch")
    assert (folder / "state/part.bin").read_bytes() == b"content"


def test_local_reads_copy_nothing(root):
    table = rollout_table(2000)
    part = writer(root).write_table("groups.arrow", table, ROLLOUT, compression=None)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    back = read_parts(root, [part], ROLLOUT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pa.total_allocated_bytes() - before < part.bytes / 10
    assert peak < part.bytes / 2
    for name in ("prompt_tokens", "response_tokens", "logprobs"):
        assert np.array_equal(flat(back[name])[0], flat(table[name])[0])


def test_a_part_that_gc_deletes_while_it_is_adopted_is_written_again(root):
    part = writer(root).write_bytes("groups.arrow", b"content")

    class Cleaned(type(root)):
        """gc, which saw the part while it was old, deletes it just after it was touched."""

        def touch(self, key):
            made = super().touch(key)
            self.remove(key)
            return made

    cleaned = Cleaned(root.url, root.backend)
    assert writer(cleaned).write_bytes("groups.arrow", b"content") == part
    assert read_part(root, part) == b"content"
