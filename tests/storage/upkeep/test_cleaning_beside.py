"""Concurrent cleaning: a stage finds old parts, forks are made, other runs are damaged."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from storage import layout
from storage.backends.root import Root
from storage.errors import InputError, LeaseLost
from storage.manifest import commit, need
from storage.ownership.lease import acquire, unlock
from storage.ownership.process import this_process
from storage.parts import PartWriter
from storage.upkeep.fork import fork
from storage.upkeep.retention import Retention, catch_up, collect, give_up
from storage.upkeep.verify import verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.runs import DOCUMENT, age, make_run
from tests.storage.stepping import SharedStore, Stepper
from tests.storage.tables import manifest

NEWEST = Retention(newest=1)
CLEANERS = {
    "collect": lambda root, **options: collect(root, WORKFLOW, "run", NEWEST, apply=True, **options),
    "catch_up": lambda root, **options: catch_up(root, WORKFLOW, "run", NEWEST, **options),
    "give_up": lambda root, **options: give_up(root, WORKFLOW, "run", NEWEST, 3, **options),
}
cleaners = pytest.mark.parametrize("clean", CLEANERS.values(), ids=CLEANERS)


def states(root: Root, run: str = "run") -> list[int]:
    """Iterations whose state is kept."""
    there = (layout.place_of(key) for key in root.keys(layout.part_folder(run)))
    return [place[0] for place in there if place is not None and place[1] == Stage.TRAIN]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [Stage.REWARD, Stage.TRAIN], ids=str)
@pytest.mark.parametrize("as_file", [False, True], ids=["bytes", "file"])
def test_a_part_that_a_stage_found_again_after_two_days_stays(root, tmp_path, stage, as_file):
    make_run(root)

    def write():
        writer = PartWriter(root, "run", 4, stage)
        if not as_file:
            return writer.write_bytes("0.distcp", b"made again")
        (tmp_path / "0.distcp").unlink(missing_ok=True)
        (tmp_path / "0.distcp").write_bytes(b"made again")
        return writer.write_files(tmp_path, ["0.distcp"])[0]

    left = write()  # and killed before the manifest
    age(root, left.key)
    found = write()  # two days later, by the next process
    assert found == left
    for clean in CLEANERS.values():
        clean(root)
    commit(root, manifest(stage, 4, (found,)))
    assert verify(root, "run").sound


def test_a_part_that_is_found_again_while_orphans_are_deleted_stays():
    # the cleaning stops after each of its store operations in turn, while a stage finds the part and commits
    outcomes = set()
    for steps in range(400):
        store = SharedStore()
        root = store.root()
        make_run(root, iterations=1)
        old = PartWriter(root, "run", 2, Stage.TRAIN).write_bytes("0.distcp", b"content")
        store.inner.store[root.backend.full(old.key)].created = datetime.now(UTC) - timedelta(days=2)
        gated = store.root(lambda: stepper)  # noqa: B023 - the stepper of this round
        stepper = Stepper(lambda gated=gated: collect(gated, WORKFLOW, "run", apply=True))
        for _ in range(steps):
            stepper.step()
        finished, deleting = stepper.ended, stepper.pausing
        part = PartWriter(root, "run", 2, Stage.TRAIN).write_bytes("0.distcp", b"content")
        commit(root, manifest(Stage.TRAIN, 2, (part,)))
        while not stepper.ended:
            stepper.step()
        assert stepper.error is None
        # between the last look and the deletion only the lease helps, which lets one process do both
        assert deleting or verify(root, "run").sound
        outcomes.add(root.exists(part.key))
        if finished:
            break
    assert finished
    assert True in outcomes


@pytest.mark.slow
@cleaners
@pytest.mark.parametrize("interrupted", ["fork", "retention"])
def test_a_fork_beside_a_cleaning_has_its_state_or_is_refused(clean, interrupted):
    # one of them pauses after each of its store operations in turn, while the other does all of its work
    outcomes = set()
    for steps in range(1000):
        store = SharedStore()
        root, refused = store.root(), []
        make_run(root, "run", iterations=3)
        gated = store.root(lambda: stepper)  # noqa: B023 - the stepper of this round

        def make_fork(at, refused=refused):
            try:
                fork(at, WORKFLOW, "run", 2, "child", "c1", DOCUMENT)
            except InputError as error:
                refused.append(error)

        first, second = (make_fork, clean) if interrupted == "fork" else (clean, make_fork)
        stepper = Stepper(lambda first=first, gated=gated: first(gated))
        for _ in range(steps):
            stepper.step()
        second(root)
        finished = stepper.ended
        while not stepper.ended:
            stepper.step()
        assert stepper.error is None
        kept = root.exists(need(root, "run", 2, Stage.TRAIN).parts[0].key)
        assert not kept
        assert refused or verify(root, "child").findings == ()
        outcomes.add(bool(refused))
        if finished:
            break
    assert finished
    assert outcomes == {True, False}


@pytest.mark.slow
def test_a_fork_takes_over_what_its_parent_retires_meanwhile():
    # gc removes states 1 and 2 while the fork at 3 is made: each is kept for it, or retired in it as well
    outcomes = set()
    for steps in range(1000):
        store = SharedStore()
        root = store.root()
        make_run(root, "run", iterations=3)
        gated = store.root(lambda: stepper)  # noqa: B023 - the stepper of this round
        stepper = Stepper(lambda gated=gated: fork(gated, WORKFLOW, "run", 3, "child", "c1", DOCUMENT))
        for _ in range(steps):
            stepper.step()
        finished = stepper.ended
        collect(root, WORKFLOW, "run", NEWEST, apply=True)
        while not stepper.ended:
            stepper.step()
        assert stepper.error is None
        assert verify(root, "child").findings == ()
        outcomes.add(tuple(states(root, "child")))
        if finished:
            break
    assert finished
    assert {(0, 3), (0, 1, 2, 3)} <= outcomes


@pytest.mark.parametrize("clean", [CLEANERS["catch_up"], CLEANERS["give_up"]])
def test_a_live_run_warns_of_a_record_that_it_cannot_read(root, clean, caplog):
    make_run(root)
    key = layout.manifest_key("run", 2, Stage.TRAIN, 0)
    root.replace(key, b"{}")
    with caplog.at_level(logging.WARNING):
        clean(root)
    (warning,) = caplog.messages
    assert key in warning


@pytest.mark.slow
@cleaners
def test_a_damaged_record_of_the_run_itself_keeps_its_parts(root, clean):
    make_run(root)
    key = layout.manifest_key("run", 2, Stage.TRAIN, 0)
    root.replace(key, b"{}")
    report = clean(root)
    assert [one.key for one in report.unreadable] == [key]
    assert states(root) == [0, 1, 2, 3]


@cleaners
def test_records_of_other_runs_may_be_damaged(root, clean):
    make_run(root)
    make_run(root, "other")
    for stage in (Stage.ROLLOUT, Stage.TRAIN):
        root.replace(layout.manifest_key("other", 2, stage, 0), b"{}")
    assert clean(root).unreadable == ()
    assert 2 not in states(root)


@pytest.mark.slow
@cleaners
def test_a_driver_that_lost_its_lease_deletes_and_retires_nothing(root, clean):
    make_run(root)
    lease = acquire(root, "run", this_process("me"))
    unlock(root, "run", this_process("another"), force=True)
    before = root.keys("run")
    with pytest.raises(LeaseLost):
        clean(root, fence=lease)
    assert root.keys("run") == before


@dataclass(frozen=True)
class LosingRoot(Root):
    """Ends the lease of the run when the first object is deleted."""

    def remove(self, key: str) -> None:
        super().remove(key)
        unlock(self, "run", this_process("another"), force=True)


def test_a_driver_that_loses_its_lease_stops_deleting(root):
    make_run(root, iterations=1)
    for number in range(100):
        part = PartWriter(root, "run", 2, Stage.ROLLOUT).write_bytes(f"{number}.arrow", b"left by a crash")
        age(root, part.key)
    losing = LosingRoot(root.url, root.backend)
    lease = acquire(losing, "run", this_process("me"))
    with pytest.raises(LeaseLost):
        collect(losing, WORKFLOW, "run", apply=True, fence=lease)
    assert 80 < len(root.keys("run/parts/000002")) < 100


@pytest.mark.slow
def test_cleaning_shows_and_ends_uploads_that_were_never_finished(s3, s3_root):
    make_run(s3_root, iterations=0)
    bucket, _, prefix = s3_root.backend.path.partition("/")
    key = "run/parts/000001/train/state/0-0123456789abcdef.distcp"
    s3_root.backend.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{key}")
    (upload,) = s3_root.uploads("run")
    young = collect(s3_root, WORKFLOW, "run", apply=True, now=upload.started + timedelta(hours=1))
    assert (young.garbage, s3_root.uploads("run")) == ((), [upload])
    (found,) = collect(s3_root, WORKFLOW, "run", now=upload.started + timedelta(days=2)).garbage
    assert (found.key, found.upload, found.reason) == (key, upload.id, "an upload that a crash ended")
    assert s3_root.uploads("run") == [upload]
    collect(s3_root, WORKFLOW, "run", apply=True, now=upload.started + timedelta(days=2))
    assert s3_root.uploads("run") == []
