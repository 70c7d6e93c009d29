"""Records that were copied or are of a later form, and strange files in a run's folder: named, and harmless."""

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from storage import layout, records
from storage.backends.root import Root, open_root
from storage.errors import RatchetError, StorageError, WrongRecord
from storage.manifest import commit, load
from storage.ownership.lease import acquire, hold, unlock
from storage.ownership.log import newest
from storage.ownership.process import this_process
from storage.parts import PartWriter
from storage.selection import SOURCES, Source
from storage.unfinished import find_piece, keep_piece
from storage.upkeep.catalog import Removal, Retired, check_not_removed, summaries
from storage.upkeep.lineage import of_sample
from storage.upkeep.removal import forget, remove
from storage.upkeep.retention import Retention, catch_up, collect, give_up
from storage.upkeep.verify import Problem, verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.harm import RUN, both, changed, copied, drop, moved, others_work
from tests.storage.runs import make_run
from tests.storage.tables import manifest


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> str:
    """The root of two runs that were driven once."""
    root = open_root(str(tmp_path_factory.mktemp("pair") / "runs"))
    for run in (RUN, "other"):
        make_run(root, run, 1)
        with hold(root, run, "test"):
            pass
    return root.folder


@pytest.fixture
def two(root: Root, pair: str) -> Root:
    shutil.copytree(pair, root.folder)
    return root


def test_a_copied_retirement_deletes_nothing(root):
    done = make_run(root, RUN)
    make_run(root, "other", 1)
    give_up(root, WORKFLOW, RUN, Retention(newest=2), 3)
    ours, theirs = (layout.retired_key(done[iteration, Stage.TRAIN].key) for iteration in (2, 1))
    copied(theirs, ours)(root)
    for clean in (catch_up, collect):
        assert [one.key for one in clean(root, WORKFLOW, RUN, Retention(newest=9)).unreadable] == [ours]
    collect(root, WORKFLOW, RUN, Retention(newest=1), apply=True)
    assert root.exists(done[2, Stage.TRAIN].parts[0].key)
    assert [(one.fault, one.key) for one in verify(root, RUN).findings] == [(Problem.DAMAGED, ours)]
    others_work(root, RUN)
    root.remove(ours)
    assert verify(root, RUN).sound


def test_a_piece_that_was_copied_over_another_doubles_no_prompt(root):
    make_run(root, RUN)
    writer = PartWriter(root, RUN, 4, Stage.ROLLOUT)
    keys = [layout.piece_key(RUN, 4, Stage.ROLLOUT, 0, name) for name in ("00000", "00001")]
    parts = [
        keep_piece(writer, name, writer.write_bytes(f"{name}.arrow", name.encode())) for name in ("00000", "00001")
    ]
    copied(*keys)(root)
    with pytest.raises(WrongRecord, match=rf"{keys[1]} holds the record of \"{keys[0]}\": .* Remove it"):
        find_piece(writer, "00001")
    assert find_piece(writer, "00000") == parts[0]
    assert (Problem.DAMAGED, keys[1]) in {(one.fault, one.key) for one in verify(root, RUN).findings}
    root.remove(keys[1])
    assert keep_piece(writer, "00001", parts[1]) == parts[1]


@pytest.mark.parametrize("stage", [Stage.ROLLOUT, Stage.EVALUATE])
def test_a_piece_names_a_part_of_its_own_stage(root, stage):
    writer, other = PartWriter(root, RUN, 4, Stage.ROLLOUT), PartWriter(root, RUN, 4 + (stage == Stage.ROLLOUT), stage)
    part = other.write_bytes("groups.arrow", b"done")
    keep_piece(writer, "00000", part)
    with pytest.raises(WrongRecord, match=r"which another stage made\. Remove the record"):
        find_piece(writer, "00000")


def entry(number: int, run: str = RUN) -> str:
    return layout.lease_key(run, number)


LEASES = {
    "copied on": copied(entry(2), entry(9)),
    "copied over": copied(entry(1), entry(2)),
    "moved": moved(entry(2), entry(9)),
    "of another run": copied(entry(2, "other"), entry(3)),
    "damaged": lambda root: root.replace(entry(2), b"{}"),
    "later format": changed(entry(2), format_version=2),
    "empty": both(drop(entry(2)), lambda root: Path(root.backend.full(entry(2))).touch()),
}


@pytest.mark.parametrize("change", LEASES.values(), ids=LEASES.keys())
def test_a_lease_that_cannot_be_read_stops_one_run_and_is_freed_on_request(two, change):
    change(two)
    with pytest.raises(StorageError, match=r"not known which process drives run run: .*`ratchet unlock run --force`"):
        acquire(two, RUN, this_process("test"))
    assert any(one.fault is Problem.DAMAGED and "/lease/" in one.key for one in verify(two, RUN).findings)
    others_work(two, RUN)
    freed, said = unlock(two, RUN, this_process("test"))
    assert (freed, "--force" in said) == (False, True)
    assert unlock(two, RUN, this_process("test"), force=True)[0]
    with hold(two, RUN, "test") as lease:
        lease.check()
    assert summaries(two)[-1].damaged is None


def test_a_holder_notices_that_its_lease_was_ended_behind_an_entry_that_cannot_be_read(root):
    lease = acquire(root, RUN, this_process("test"))
    copied(entry(1), entry(5))(root)
    with pytest.raises(WrongRecord, match="--force"):
        lease.check()
    unlock(root, RUN, this_process("another"), force=True)
    with pytest.raises(RatchetError, match="ended by another"):
        lease.check()
    assert newest(root, RUN).number == 6


STRAYS = [
    "lease/000000001 (copy).json",
    "lease/._000000001.json",
    "lease/backup.json",
    "lease/000000077 (copy).json",
    "lease/77.json",
    "lease/1.json",
    "lease/0000000001.json",
    "lease/note",
    "lease/000000001.json~",
    "revisions/x.json",
    "revisions/head-1.json",
    "revisions/head-000001 (1).json",
    "revisions/rerun-0000001.json",
    "copies/x",
    "copies/head-000001.json",
    "manifests/000001/notes.txt",
    "manifests/README",
    "manifests/000001/rollout.r00.json",
    "manifests/0000001/rollout.r0.json",
    "manifests/000001/rollout.r0.json.bak",
    "manifests/000001/Rollout.r0.json",
    "manifests/000001/rollout.r0.attempt-00.json",
    "manifests/\u0661/rollout.r0.json",
    "manifests/000001/train.r0 (copy).retired.json",
    "archive/notes.txt",
    "archive/samples.parquet",
    "notes",
    "run.json~",
    "x/y/z",
    ".DS_Store",
    "manifests/000001/rollout.r0.pieces/a/b.json",
    os.fsdecode(b"lease/\xff.json"),
    os.fsdecode(b"parts/000001/rollout/\xff"),
    os.fsdecode(b"manifests/000001/rollout.r0.pieces/\xff.json"),
]


def test_stray_files_are_named_and_disturb_nothing(two):
    for name in STRAYS:
        path = Path(two.backend.full(f"{RUN}/{name}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(two.backend.full(layout.manifest_key(RUN, 1, Stage.ROLLOUT, 0)), path)
    report = verify(two, RUN)
    shown = {f"{RUN}/{name.encode(errors='backslashreplace').decode()}" for name in STRAYS}
    assert {(one.fault, one.key) for one in report.findings} == {(Problem.STRAY, key) for key in shown}
    assert report.model_dump_json()
    assert report.sound
    others_work(two, "nothing")
    with hold(two, RUN, "test") as lease:
        remove(two, RUN, lease)
    forget(two, RUN)
    assert two.keys(RUN) == []


NOTHING = {"root": None, "reward": None, "prepare": None, "stop_tokens": None, "run": "r", "key": "k", "rollout": "0"}
SOURCE = Source.model_validate({**dict.fromkeys(Source.model_fields, 0), **NOTHING})
FORMS = {
    "not JSON": b"garbage",
    "of another form": b'[{"a": 1}]',
    "no list": b'{"sources": []}',
    "later member": json.dumps([{**SOURCE.model_dump(), "more": 1}]).encode(),
    "deep": b"[" * 100000 + b"]" * 100000,
    "no text": b"\xff\xfe",
}


@pytest.mark.slow
@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS.keys())
def test_sources_of_a_later_form_are_named_and_hinder_no_other_run(two, data):
    part = PartWriter(two, RUN, 0, Stage.SELECT).write_bytes(SOURCES, data)
    commit(two, manifest(Stage.SELECT, 0, (part,), run=RUN))
    assert [(one.fault, one.key) for one in verify(two, RUN).findings] == [(Problem.DAMAGED, part.key)]
    assert of_sample(two, WORKFLOW, "other", 1, "p0", 0).used_by
    others_work(two, RUN)


def test_a_run_whose_folder_was_renamed_is_refused_with_its_name(root):
    make_run(root, RUN)
    (root.folder / RUN).rename(root.folder / "other")
    with pytest.raises(WrongRecord, match=rf"The folder of run {RUN} keeps that name; `ratchet fork` copies"):
        load(root, layout.manifest_key("other", 1, Stage.ROLLOUT, 0))
    with pytest.raises(WrongRecord, match=rf"The folder of run {RUN} keeps that name; `ratchet fork` copies"):
        records.read(root, layout.run_config_key("other"), Removal)


def test_a_copied_record_of_a_removal_removes_nothing(two):
    records.publish(two, layout.removal_key("other"), Removal(time=datetime.now(UTC)))
    copied(layout.removal_key("other"), layout.removal_key(RUN))(two)
    with pytest.raises(WrongRecord, match=r'holds the record of "other/removal\.json": .* Remove it'):
        check_not_removed(two, RUN)
    two.remove(layout.removal_key(RUN))
    check_not_removed(two, RUN)


ROLLED = "manifests/000001/rollout.r0.json"
DISTURBED = {
    "a folder for a record": ("run.json", lambda path: path.mkdir()),
    "a link to nothing": ("run.json", lambda path: path.symlink_to("nowhere")),
    "a link to itself": ("run.json", lambda path: path.symlink_to("run.json")),
    "a manifest that links to itself": (ROLLED, lambda path: path.symlink_to("rollout.r0.json")),
    "a folder for a manifest": (ROLLED, lambda path: path.mkdir()),
    "a folder that links to itself": ("manifests/000001", lambda path: path.symlink_to("000001")),
    "a file for a folder": ("lease", lambda path: path.touch()),
    "a file for all manifests": ("manifests", lambda path: path.touch()),
    "manifests in a circle": ("manifests/000001/again", lambda path: path.symlink_to(path.parents[1])),
    "revisions in a file": ("revisions", lambda path: path.touch()),
    "deep JSON": ("run.json", lambda path: path.write_bytes(b"[" * 100000)),
    "no JSON": ("run.json", lambda path: path.write_bytes(b"\xff\n")),
    "an empty manifest": ("manifests/000000/prepare.r0.json", lambda path: path.touch()),
    "an empty retirement": ("manifests/000001/train.r0.retired.json", lambda path: path.touch()),
}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "put"), DISTURBED.values(), ids=DISTURBED.keys())
def test_whatever_is_in_a_folder_of_one_run_the_others_are_listed_and_cleaned(two, place, put):
    path = Path(two.backend.full(f"{RUN}/{place}"))
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    put(path)
    verify(two, RUN).model_dump_json()
    others_work(two, RUN)


def test_a_retirement_of_another_manifest_of_the_same_place_deletes_nothing(root):
    state = make_run(root, RUN)[2, Stage.TRAIN]
    key = layout.retired_key(state.key)
    record = Retired(manifest="0" * 32, keys=tuple(part.key for part in state.parts), time=datetime.now(UTC), rule="")
    records.publish(root, key, record)
    assert [one.key for one in catch_up(root, WORKFLOW, RUN, Retention(newest=9)).unreadable] == [key]
    assert root.exists(state.parts[0].key)
    assert [(one.fault, one.key) for one in verify(root, RUN).findings] == [(Problem.DAMAGED, key)]
