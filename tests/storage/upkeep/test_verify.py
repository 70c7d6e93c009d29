"""verify names everything that differs from what was written, and nothing else."""

import random
from pathlib import Path

import numpy as np
import pytest

from storage import layout
from storage.ownership.lease import acquire
from storage.ownership.process import this_process
from storage.parts import PartWriter
from storage.unfinished import Grown, IncrementRecord, begin, keep_increment, keep_piece
from storage.upkeep.archive import compact
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import Problem, verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.runs import make_run, put


def found(root, run="run"):
    return {(finding.fault, finding.key) for finding in verify(root, run).findings}


def flip(root, key, random_source):
    data = bytearray(root.read_bytes(key))
    data[random_source.randrange(len(data))] ^= 1 << random_source.randrange(8)
    root.replace(key, bytes(data))


def test_a_run_as_it_was_written_is_sound(any_root):
    manifests = make_run(any_root)
    report = verify(any_root, "run")
    assert report.sound
    assert report.findings == ()
    assert (report.manifests, report.parts) == (len(manifests), sum(len(m.parts) for m in manifests.values()))
    assert report.bytes == sum(part.bytes for m in manifests.values() for part in m.parts)


def test_a_flipped_bit_in_any_part_or_manifest_is_named(root):
    make_run(root, iterations=1)
    compact(root, WORKFLOW, "run")
    source = random.Random(0)
    for key in root.keys("run"):
        good = root.read_bytes(key)
        flip(root, key, source)
        report = verify(root, "run")
        assert (Problem.DAMAGED, key) in {(finding.fault, finding.key) for finding in report.findings}
        assert not report.sound
        root.replace(key, good)
    assert verify(root, "run").sound


def test_everything_that_is_missing_is_named(root):
    manifests = make_run(root, iterations=2)
    rollout = manifests[1, Stage.ROLLOUT]
    for part in rollout.parts:
        root.remove(part.key)
    assert found(root) == {(Problem.MISSING, part.key) for part in rollout.parts}
    manifest_key = layout.manifest_key("run", 1, Stage.ROLLOUT, 0)
    root.remove(manifest_key)
    users = [layout.manifest_key("run", 1, stage, 0) for stage in (Stage.REWARD, Stage.TRAIN)]
    assert found(root) == {(Problem.UNKNOWN_INPUT, key) for key in users}
    root.remove(layout.run_config_key("run"))
    assert (Problem.MISSING, layout.run_config_key("run")) in found(root)


def test_parts_that_nothing_names_are_named_and_do_no_harm(root):
    make_run(root)
    orphan = PartWriter(root, "run", 4, Stage.ROLLOUT).write_bytes("groups.arrow", b"left by a crash")
    report = verify(root, "run")
    assert found(root) == {(Problem.ORPHANED, orphan.key)}
    assert report.sound


def test_a_damaged_record_of_a_retirement_is_named(root):
    make_run(root)
    collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
    key = layout.retired_key(layout.manifest_key("run", 1, Stage.TRAIN, 0))
    flip(root, key, random.Random(0))
    assert (Problem.DAMAGED, key) in found(root)


def test_pieces_of_a_stage_in_work_are_needed_and_checked(root):
    make_run(root)
    writer = PartWriter(root, "run", 4, Stage.ROLLOUT)
    part = keep_piece(writer, "00000-abc", writer.write_bytes("groups-00000.arrow", b"done"))
    assert found(root) == set()
    root.replace(part.key, b"d0ne")
    assert found(root) == {(Problem.DAMAGED, part.key)}
    root.remove(part.key)
    assert found(root) == {(Problem.MISSING, part.key)}
    # once the stage is committed without it, it is only an orphan
    writer.write_bytes("groups-00000.arrow", b"done")
    put(root, "run", 4, Stage.ROLLOUT, {})
    assert found(root) == {(Problem.ORPHANED, part.key)}


def test_a_damaged_record_of_an_attempt_is_named(root):
    make_run(root)
    key = layout.attempt_key("run", 4, Stage.ROLLOUT, 0, 0)
    begin(root, "run", 4, Stage.ROLLOUT, "host:1")
    assert found(root) == set()
    flip(root, key, random.Random(0))
    assert found(root) == {(Problem.DAMAGED, key)}


def test_a_damaged_record_of_an_increment_is_named(root):
    make_run(root)
    piece = layout.piece_key("run", 4, Stage.ROLLOUT, 0, "a")
    key = layout.increment_key(piece, 0)
    one = Grown(0, 0, np.array([5], np.int32), np.array([-1.0], np.float32))
    for number in range(2):
        keep_increment(root, piece, number, IncrementRecord.of([one], number))
    assert found(root) == set()
    flip(root, key, random.Random(0))
    assert found(root) == {(Problem.DAMAGED, key)}
    root.remove(key)
    assert found(root) == {(Problem.MISSING, key)}
    writer = PartWriter(root, "run", 4, Stage.ROLLOUT)
    keep_piece(writer, "a", writer.write_bytes("a.arrow", b"a"))
    assert found(root) == set()  # gc may be at work on them


def test_a_run_in_work_is_verified_without_fuss(root):
    make_run(root)
    begin(root, "run", 4, Stage.ROLLOUT, "host:1")
    acquire(root, "run", this_process("me"))
    root.replace(layout.report_key("run", "curves.png"), b"png")
    assert verify(root, "run").sound


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"run": {}}\n', b'{"run": {"name": "run"}}'])
def test_a_damaged_configuration_is_named(root, content):
    make_run(root, iterations=0)
    root.replace(layout.run_config_key("run"), content)
    assert found(root) == {(Problem.DAMAGED, layout.run_config_key("run"))}


def test_what_is_gone_since_it_was_listed_is_no_fault(root):
    make_run(root)
    gone = [
        layout.archive_key("run", "chunk", range(1, 3), "0" * 32),
        layout.attempt_key("run", 1, Stage.ROLLOUT, 0, 7),
        layout.piece_key("run", 1, Stage.ROLLOUT, 0, "left"),
    ]
    for key in gone:  # a link to nothing is listed, and cannot be read
        path = Path(root.backend.full(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("nothing")
        assert key in root.keys("run")
    assert verify(root, "run").findings == ()
