"""gc deletes what nothing needs, and nothing else."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from storage import layout, records
from storage.backends.root import open_root
from storage.errors import PartMissing
from storage.manifest import find, need
from storage.ownership.lease import acquire, newest
from storage.ownership.process import this_process
from storage.parts import PartWriter, materialize
from storage.unfinished import Grown, IncrementRecord, begin, keep_increment, keep_piece
from storage.upkeep.beside import collect_beside
from storage.upkeep.catalog import Retired, contents
from storage.upkeep.fork import fork
from storage.upkeep.retention import Retention, catch_up, collect, give_up
from storage.upkeep.verify import verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.counting import counting
from tests.storage.runs import DOCUMENT, age, make_iteration, make_run, put

LATER = datetime.now(UTC) + timedelta(days=2)


def keys(collection):
    return {one.key for one in collection.garbage}


def state_key(root, iteration, run="run"):
    return need(root, run, iteration, Stage.TRAIN).parts[0].key


def kept_state(root, iteration):
    made = find(root, "run", iteration, Stage.TRAIN)
    return made is not None and root.exists(made.parts[0].key)


def test_a_clean_run_has_no_garbage(any_root):
    make_run(any_root)
    before = any_root.keys("")
    assert collect(any_root, WORKFLOW, "run", apply=True, now=LATER).garbage == ()
    assert any_root.keys("") == before


def test_orphans_go_when_they_are_a_day_old(root):
    make_run(root)
    writer = PartWriter(root, "run", 4, Stage.ROLLOUT)
    old, young = (writer.write_bytes("groups.arrow", data) for data in (b"old", b"young"))
    age(root, old.key)
    assert keys(collect(root, WORKFLOW, "run")) == {old.key}
    assert root.exists(old.key)
    report = collect(root, WORKFLOW, "run", apply=True)
    assert (keys(report), report.bytes, report.applied) == ({old.key}, 3, True)
    assert not root.exists(old.key)
    assert root.exists(young.key)


@pytest.mark.slow
def test_pieces_of_a_stage_in_work_stay_and_go_once_it_is_committed(root):
    make_run(root)
    writer = PartWriter(root, "run", 4, Stage.ROLLOUT)
    kept = keep_piece(writer, "00000-abc", writer.write_bytes("groups-00000.arrow", b"done"))
    piece = layout.piece_key("run", 4, Stage.ROLLOUT, 0, "00000-abc")
    assert keys(collect(root, WORKFLOW, "run", now=LATER)) == set()
    make_iteration(root, "run", 4)
    assert keys(collect(root, WORKFLOW, "run")) == set()
    for key in (kept.key, piece):
        age(root, key)
    assert keys(collect(root, WORKFLOW, "run", apply=True)) == {kept.key, piece}
    assert verify(root, "run").findings == ()


@pytest.mark.parametrize("by", ["piece", "stage"])
def test_increments_stay_while_responses_go_on_and_go_once_they_are_stored(root, by):
    make_run(root)
    writer = PartWriter(root, "run", 4, Stage.ROLLOUT)
    piece = layout.piece_key("run", 4, Stage.ROLLOUT, 0, "a")
    key = layout.increment_key(piece, 0)
    one = Grown(0, 0, np.array([5], np.int32), np.array([-1.0], np.float32))
    keep_increment(root, piece, 0, IncrementRecord.of([one], 3))
    assert keys(collect(root, WORKFLOW, "run", now=LATER)) == set()
    assert verify(root, "run").findings == ()
    if by == "stage":
        make_iteration(root, "run", 4)
    else:
        keep_piece(writer, "a", writer.write_bytes("groups-00000.arrow", b"done"))
    assert keys(collect(root, WORKFLOW, "run")) == set()
    age(root, key)
    assert keys(collect(root, WORKFLOW, "run", apply=True)) == {key}
    assert verify(root, "run").findings == ()


def test_attempts_stay_while_the_stage_is_in_work_and_go_once_it_is_committed(root):
    make_run(root)
    begin(root, "run", 4, Stage.REWARD, "host:1")
    attempt = layout.attempt_key("run", 4, Stage.REWARD, 0, 0)
    assert keys(collect(root, WORKFLOW, "run", now=LATER)) == set()
    make_iteration(root, "run", 4)
    assert keys(collect(root, WORKFLOW, "run")) == set()
    age(root, attempt)
    assert keys(collect(root, WORKFLOW, "run", apply=True)) == {attempt}
    assert verify(root, "run").findings == ()


@pytest.mark.slow
def test_what_a_crash_left_half_written_goes(root):
    make_run(root)
    leftover = f"run/parts/{layout.temporary_name('x')}"
    root.replace(leftover, b"half")
    assert keys(collect(root, WORKFLOW, "run")) == set()
    age(root, leftover)
    assert keys(collect(root, WORKFLOW, "run", apply=True)) == {leftover}


@pytest.mark.slow
def test_lease_entries_go_but_for_the_newest(root):
    make_run(root)
    lease = acquire(root, "run", this_process("me"))
    lease.renew()
    for key in root.keys("run/lease"):
        age(root, key)
    assert keys(collect(root, WORKFLOW, "run", apply=True)) == {layout.lease_key("run", 1)}
    assert newest(root, "run").number == 2
    lease.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), range(10)),
        (Retention(newest=3), [0, 7, 8, 9]),
        (Retention(newest=0), [0, 9]),
        (Retention(newest=2, every=4), [0, 4, 8, 9]),
    ],
    ids=str,
)
def test_retention_keeps_the_newest_and_every_so_many(root, retention, kept):
    make_run(root, iterations=9)
    states = {iteration: state_key(root, iteration) for iteration in range(10)}
    given_up = {key for iteration, key in states.items() if iteration not in kept}
    assert keys(collect(root, WORKFLOW, "run", retention)) == given_up
    assert all(root.exists(key) for key in states.values())
    assert keys(collect(root, WORKFLOW, "run", retention, apply=True)) == given_up
    assert {iteration for iteration, key in states.items() if root.exists(key)} == set(kept)
    report = verify(root, "run")
    assert (report.sound, report.findings, report.retired) == (True, (), len(given_up))
    assert keys(collect(root, WORKFLOW, "run", retention, apply=True)) == set()


def test_what_a_run_goes_on_with_is_kept_wherever_it_stopped(root):
    make_run(root, iterations=2)
    before = find(root, "run", 2, Stage.TRAIN)
    inputs = {"prepare": find(root, "run", 0, Stage.PREPARE)}
    for stage in (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC):
        # until the next weights are served, an engine may need those of iteration 2 once more
        collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
        trained = [3] if find(root, "run", 3, Stage.TRAIN) else []
        assert [n for n in range(4) if kept_state(root, n)] == [0, 2, *trained]
        put(root, "run", 3, stage, {**inputs, "state": before}, data=stage.value.encode())
    collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
    assert [n for n in range(4) if kept_state(root, n)] == [0, 3]


def test_a_state_that_was_given_up_says_so(root, tmp_path):
    make_run(root)
    collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
    with pytest.raises(PartMissing, match="retention deleted it"):
        materialize(root, need(root, "run", 1, Stage.TRAIN), tmp_path)
    record = records.read(root, layout.retired_key(layout.manifest_key("run", 1, Stage.TRAIN, 0)), Retired)
    assert "newest 1 are kept" in record.rule


def test_a_retention_that_a_crash_cut_short_is_completed(root):
    make_run(root, iterations=5)
    retention, moment = Retention(newest=1), datetime.now(UTC)
    key = layout.manifest_key("run", 2, Stage.TRAIN, 0)
    record = Retired(manifest=need(root, "run", 2, Stage.TRAIN).digest, keys=(), time=moment, rule="")
    records.publish(root, layout.retired_key(key), record)
    collect(root, WORKFLOW, "run", retention, apply=True)
    assert [n for n in range(6) if root.exists(state_key(root, n))] == [0, 5]


def test_a_fork_and_its_parent_keep_and_delete_parts_of_their_own(root):
    make_run(root, iterations=4)
    fork(root, WORKFLOW, "run", 2, "fork", "c1", DOCUMENT)
    mine, theirs = state_key(root, 2), state_key(root, 2, "fork")
    assert mine in keys(collect(root, WORKFLOW, "run", Retention(newest=1), apply=True))
    assert not root.exists(mine)
    assert root.exists(theirs)
    make_iteration(root, "fork", 3)
    assert keys(give_up(root, WORKFLOW, "fork", Retention(newest=1), 3)) == {theirs}
    assert verify(root, "run").findings == verify(root, "fork").findings == ()


def test_no_other_run_is_looked_at(root):
    make_run(root)
    for other in ("fork", "other"):
        fork(root, WORKFLOW, "run", 2, other, "c1", DOCUMENT)
    root.replace(layout.manifest_key("other", 0, Stage.PREPARE, 0), b"{}")
    counted = counting(root)
    for clean in (collect, collect_beside):
        clean(counted, WORKFLOW, "run")
    verify(counted, "run")
    catch_up(counted, WORKFLOW, "run", Retention(newest=1))
    assert {asked.split(" ")[1].partition("/")[0] for asked in counted.asked} == {"run"}


def test_contents_know_what_is_kept(root):
    make_run(root, iterations=3)
    collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
    stored = contents(root, "run")
    assert len(stored.manifests) - len(stored.kept) == 2
    assert not stored.parts().keys() & {state_key(root, 1), state_key(root, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("retention", [Retention(newest=1), Retention(newest=2), Retention(newest=2, every=3)], ids=str)
def test_one_state_after_the_other_is_given_up_as_collect_would(root, retention):
    one_by_one, at_once = (open_root(f"{root.folder}-{name}") for name in ("one", "all"))
    make_run(at_once, iterations=7)
    make_run(one_by_one, iterations=0)
    for iteration in range(1, 8):
        make_iteration(one_by_one, "run", iteration)
        give_up(one_by_one, WORKFLOW, "run", retention, iteration)
        assert verify(one_by_one, "run").sound
    collect(at_once, WORKFLOW, "run", retention, apply=True)
    assert [one_by_one.exists(state_key(one_by_one, n)) for n in range(8)] == [
        at_once.exists(state_key(at_once, n)) for n in range(8)
    ]
    assert collect(one_by_one, WORKFLOW, "run", retention, apply=True).garbage == ()


@pytest.mark.slow
@pytest.mark.parametrize("retention", [Retention(newest=1), Retention(newest=2, every=3)], ids=str)
def test_a_process_that_starts_deletes_states_as_collect_would(root, retention):
    whole, quick = (open_root(f"{root.folder}-{name}") for name in ("whole", "quick"))
    for store in (whole, quick):
        make_run(store, iterations=7)
        store.remove(layout.manifest_key("run", 7, Stage.WEIGHT_SYNC, 0))
        orphan = PartWriter(store, "run", 5, Stage.TRAIN).write_bytes(
            "state/0.distcp", b"of an attempt that was killed"
        )
        age(store, orphan.key)
    expected = collect(whole, WORKFLOW, "run", retention, apply=True)
    assert keys(catch_up(quick, WORKFLOW, "run", retention)) == keys(expected)
    assert quick.keys("") == whole.keys("")
    assert catch_up(quick, WORKFLOW, "run", retention).garbage == ()


def test_a_process_that_starts_keeps_what_the_next_attempt_may_find(root):
    make_run(root)
    left = PartWriter(root, "run", 4, Stage.TRAIN).write_bytes("state/0.distcp", b"of a stage that was killed")
    age(root, left.key)
    assert catch_up(root, WORKFLOW, "run", Retention(newest=1)).unreadable == ()
    assert root.exists(left.key)
    assert keys(collect(root, WORKFLOW, "run", apply=True)) == {left.key}


def test_a_process_that_starts_reads_few_manifests(root):
    make_run(root, iterations=9)
    collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
    make_iteration(root, "run", 10)
    counted = counting(root)
    catch_up(counted, WORKFLOW, "run", Retention(newest=1))
    read = {key.split(" ")[1] for key in counted.asked if key.startswith("read")}
    assert read == {layout.manifest_key("run", iteration, Stage.TRAIN, 0) for iteration in (9, 10)}


def test_states_that_a_crash_left_after_their_record_are_deleted_at_the_next_start(root):
    make_run(root, iterations=5)
    key = layout.manifest_key("run", 2, Stage.TRAIN, 0)
    record = Retired(manifest=need(root, "run", 2, Stage.TRAIN).digest, keys=(), time=datetime.now(UTC), rule="")
    records.publish(root, layout.retired_key(key), record)
    catch_up(root, WORKFLOW, "run", Retention(newest=9))
    assert [n for n in range(6) if kept_state(root, n)] == [0, 1, 3, 4, 5]
