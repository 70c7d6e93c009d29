"""Cleaning and checking beside the process that drives a run."""

from datetime import UTC, datetime, timedelta

import pytest

from storage import layout, unfinished
from storage.manifest import commit
from storage.ownership.lease import acquire, unlock
from storage.ownership.process import this_process
from storage.parts import PartWriter
from storage.unfinished import keep_piece
from storage.upkeep.beside import collect_beside, verify_beside
from storage.upkeep.retention import Retention, catch_up
from storage.upkeep.verify import Problem, verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.runs import age, make_run
from tests.storage.stepping import SharedStore, Stepper
from tests.storage.tables import manifest


def left(root, iteration, stage=Stage.TRAIN, name="0.distcp"):
    """A part that a crash left two days ago."""
    part = PartWriter(root, "run", iteration, stage).write_bytes(name, b"left by a crash")
    age(root, part.key)
    return part


@pytest.mark.parametrize("by", ["attempt", "piece"])
def test_what_a_stage_in_progress_may_find_stays(root, by):
    make_run(root)
    acquire(root, "run", this_process("the driver"))
    finished, waiting, begun = left(root, 3), left(root, 4), left(root, 2)
    if by == "attempt":
        unfinished.begin(root, "run", 2, Stage.EVALUATE, "the driver")
    else:  # the record of the attempt is not flushed, and may be lost
        writer = PartWriter(root, "run", 2, Stage.EVALUATE)
        keep_piece(writer, "00000", writer.write_bytes("samples.arrow", b"some"))
    deleted = collect_beside(root, WORKFLOW, "run")
    assert deleted.applied
    assert [one.key for one in deleted.garbage] == [finished.key]
    assert not root.exists(finished.key)
    assert root.exists(waiting.key)
    assert root.exists(begun.key)


def test_writes_that_were_never_finished_go_and_the_lease_stays(root):
    make_run(root)
    for _ in range(3):
        acquire(root, "run", this_process("the driver")).release()
    acquire(root, "run", this_process("the driver"))
    entries = root.keys("run/lease")
    temporary = f"run/parts/000004/train/{layout.temporary_name('x')}"
    root.replace(temporary, b"half")
    for key in (*entries, temporary):
        age(root, key)
    assert [one.key for one in collect_beside(root, WORKFLOW, "run").garbage] == [temporary]
    assert root.keys("run/lease") == entries


@pytest.mark.slow
def test_nothing_more_is_deleted_once_another_process_drives(root):
    make_run(root)
    acquire(root, "run", this_process("the driver"))
    for number in range(40):
        left(root, 3, name=f"{number}.distcp")
    removed = []

    class Watching(type(root)):
        def remove(self, key):
            super().remove(key)
            if not removed:
                unlock(self, "run", this_process("another"), force=True)
                acquire(self, "run", this_process("another"))
            removed.append(key)

    watching = Watching(root.url, root.backend)
    assert len(collect_beside(watching, WORKFLOW, "run").garbage) == len(removed)
    assert 0 < len(removed) < 40


@pytest.mark.slow
def test_a_part_that_is_found_again_beside_the_cleaning_stays():
    # the cleaning stops after each of its store operations in turn, while the driver does the whole stage
    deletions = set()
    for steps in range(400):
        store = SharedStore()
        root = store.root()
        make_run(root, iterations=1)
        acquire(root, "run", this_process("the driver"))
        old = PartWriter(root, "run", 2, Stage.TRAIN).write_bytes("0.distcp", b"content")
        other = PartWriter(root, "run", 1, Stage.TRAIN).write_bytes("left.distcp", b"content")
        for part in (old, other):
            store.inner.store[root.backend.full(part.key)].created = datetime.now(UTC) - timedelta(days=2)
        gated = store.root(lambda: stepper)  # noqa: B023 - the stepper of this round
        stepper = Stepper(lambda gated=gated: collect_beside(gated, WORKFLOW, "run"))
        for _ in range(steps):
            stepper.step()
        finished = stepper.ended
        unfinished.begin(root, "run", 2, Stage.TRAIN, "the driver")
        part = PartWriter(root, "run", 2, Stage.TRAIN).write_bytes("0.distcp", b"content")
        commit(root, manifest(Stage.TRAIN, 2, (part,)))
        while not stepper.ended:
            stepper.step()
        assert stepper.error is None
        assert verify(root, "run").sound
        deletions.add(root.exists(other.key))
        if finished:
            break
    assert finished
    assert deletions == {False}


@pytest.mark.slow
def test_cleaning_twice_at_once_and_again_does_no_harm():
    for steps in range(400):
        store = SharedStore()
        root = store.root()
        make_run(root, iterations=1)
        acquire(root, "run", this_process("the driver"))
        other = PartWriter(root, "run", 1, Stage.TRAIN).write_bytes("left.distcp", b"content")
        store.inner.store[root.backend.full(other.key)].created = datetime.now(UTC) - timedelta(days=2)
        gated = store.root(lambda: stepper)  # noqa: B023 - the stepper of this round
        stepper = Stepper(lambda gated=gated: collect_beside(gated, WORKFLOW, "run"))
        for _ in range(steps):
            stepper.step()
        finished = stepper.ended
        collect_beside(root, WORKFLOW, "run")
        if steps % 2:
            stepper.kill()
        while not stepper.ended:
            stepper.step()
        assert stepper.error is None
        assert not root.exists(other.key)
        assert verify(root, "run").sound
        if finished:
            break
    assert finished


@pytest.mark.slow
def test_a_state_that_retention_deletes_during_a_verification_is_not_missing(root):
    make_run(root)
    retired = []

    class Retiring(type(root)):
        def read_buffer(self, key):
            if not retired:
                retired.append(catch_up(root, WORKFLOW, "run", Retention(newest=1)))
            return super().read_buffer(key)

    reading = Retiring(root.url, root.backend)
    assert not verify(reading, "run").sound
    retired.clear()
    make_run(root, "run", 5)
    assert verify_beside(reading, "run").sound


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_what_is_really_wrong_is_found(root, damage):
    made = make_run(root)
    key = made[2, Stage.ROLLOUT].parts[0].key
    root.remove(key)
    if damage == "damaged":
        root.replace(key, b"something else")
    (finding,) = verify_beside(root, "run").findings
    assert (finding.key, finding.fault) == (key, Problem(damage))
