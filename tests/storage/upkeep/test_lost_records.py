"""Records that are lost, copied, moved or of a later form: they are named, and stop only their dependents."""

import json
import re
import shutil
from pathlib import Path

import pytest

from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import DigestMismatch, SchemaMismatch, WrongRecord
from storage.manifest import commit, need
from storage.ownership.lease import hold, unlock
from storage.ownership.process import this_process
from storage.parts import PartWriter
from storage.records import unseal
from storage.revisions import keep_copies, read_revisions, record_choice, record_rerun, uncopied
from storage.unfinished import begin, keep_piece
from storage.upkeep.catalog import names, summaries
from storage.upkeep.redoing import Wanted, ask, choose
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import Problem, verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.harm import RUN, both, changed, copied, drop, moved, others_work, swapped, without_folder
from tests.storage.revised import choice, rerun
from tests.storage.runs import make_run
from tests.storage.upkeep.test_redoing import after, again

RERUN, CHOICE = (lambda number: layout.rerun_key(RUN, number)), (lambda number: layout.choice_key(RUN, number))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> str:
    """The root of a run with two redone stages, and a choice of the first result in between; the head is 2."""
    root = open_root(str(tmp_path_factory.mktemp("redone") / "runs"))
    make_run(root, RUN)
    make_run(root, "other", 1)
    first = again(root, 3, Stage.TRAIN, b"another state")
    after(root, 3, Stage.WEIGHT_SYNC, first, "train")
    with hold(root, RUN, "test") as lease:
        choose(root, WORKFLOW, RUN, 0, "back", "tests", lease)
    again(root, 3, Stage.TRAIN, b"a third state")
    assert read_revisions(root, RUN).head == 2
    return root.folder


@pytest.fixture
def redone(root: Root, made: str) -> Root:
    shutil.copytree(made, root.folder)
    return root


def test_the_last_choice_that_is_lost_with_its_copy_is_known_from_the_lease(redone: Root):
    """No other record of the run shows the choice."""
    for key in [CHOICE(3), *[key for key in redone.keys(f"{RUN}/copies") if "head-000003" in key]]:
        redone.remove(key)
    assert read_revisions(redone, RUN).head == 0
    (finding,) = verify(redone, RUN).findings
    assert (finding.fault, CHOICE(3) in finding.detail) == (Problem.DAMAGED, True)
    for _ in range(2):
        with pytest.raises(WrongRecord, match=rf"{CHOICE(3)} is lost, and its copy too"), hold(redone, RUN, "test"):
            pass
    assert unlock(redone, RUN, this_process("me"))[0] is False
    assert unlock(redone, RUN, this_process("me"), force=True)[0] is True
    with hold(redone, RUN, "test"):
        assert verify(redone, RUN).sound


LOST = {
    "last choice": drop(CHOICE(3)),
    "middle choice": drop(CHOICE(2)),
    "first choice": drop(CHOICE(1)),
    "all choices": both(*map(drop, map(CHOICE, (1, 2, 3)))),
    "middle choice with its copy": both(drop(CHOICE(2)), without_folder("copies")),
    "last rerun": drop(RERUN(2)),
    "first rerun with its copy": both(drop(RERUN(1)), without_folder("copies")),
    "first rerun": drop(RERUN(1)),
    "folder": without_folder("revisions"),
    "choice copied on": copied(CHOICE(1), CHOICE(4)),
    "choice copied over another": copied(CHOICE(1), CHOICE(3)),
    "choice copied far": copied(CHOICE(1), CHOICE(40)),
    "choice moved": moved(CHOICE(3), CHOICE(4)),
    "choices swapped": swapped(CHOICE(2), CHOICE(3)),
    "rerun copied on": copied(RERUN(1), RERUN(3)),
    "rerun copied over another": copied(RERUN(1), RERUN(2)),
    "rerun as a choice": copied(RERUN(1), CHOICE(3)),
    "renamed beside": moved(CHOICE(3), f"{RUN}/revisions/head-3.json"),
    "of another life": changed(CHOICE(3), revision=1, goes_on=1),
    "rerun of another life": changed(RERUN(2), stage="reward"),
    "later format": both(changed(CHOICE(3), format_version=2), without_folder("copies")),
    "later member": both(changed(RERUN(2), why=1), without_folder("copies")),
    "its own parent": both(changed(RERUN(2), parent=2), without_folder("copies")),
    "a later parent": both(changed(RERUN(1), parent=2), without_folder("copies")),
    "goes on where nothing is": both(changed(CHOICE(1), goes_on=7), without_folder("copies")),
    "a revision that nothing makes": both(changed(CHOICE(3), revision=7), without_folder("copies")),
    "empty": both(drop(CHOICE(3)), lambda root: Path(root.backend.full(CHOICE(3))).touch()),
    "both of the last rerun": both(drop(RERUN(2)), without_folder("copies"), drop(CHOICE(3))),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", LOST.values(), ids=LOST.keys())
def test_a_head_is_never_another_because_of_a_record(redone, change):
    change(redone)
    for use in (names, summaries_of, lambda *_: choosing(redone, 0), lambda *_: asking(redone)):
        with pytest.raises((SchemaMismatch, WrongRecord, DigestMismatch), match=r"run/(revisions|manifests)/"):
            use(redone, RUN)
    report = verify(redone, RUN)
    assert not report.sound
    assert any("revisions" in one.key and one.fault is Problem.DAMAGED for one in report.findings)
    others_work(redone, RUN)


def summaries_of(root: Root, run: str) -> None:
    raise WrongRecord(str(next(one.damaged for one in summaries(root) if one.run == run)))


def choosing(root: Root, revision: int):
    with hold(root, RUN, "test") as lease:
        return choose(root, WORKFLOW, RUN, revision, "a test", "tests", lease)


def asking(root: Root):
    with hold(root, RUN, "test") as lease:
        return ask(root, WORKFLOW, RUN, Wanted(3, Stage.REWARD, "a test", "tests"), lease)


@pytest.mark.parametrize("way", [CHOICE(3), CHOICE(2), RERUN(1), "swapped", "folder"])
def test_the_repair_that_is_advised_works(redone, way):
    before = read_revisions(redone, RUN)
    changes = {"swapped": swapped(CHOICE(2), CHOICE(3)), "folder": without_folder("revisions")}
    changes.get(way, drop(way))(redone)
    for _ in range(9):
        try:
            read_revisions(redone, RUN)
        except WrongRecord as error:
            for source, target in re.findall(r"(\S+/copies/\S+\.json) to ([^\s,]+)", str(error)):
                copied(source, target)(redone)
            for key in re.findall(r"(\S+) holds the record of .* Remove it", str(error)):
                redone.remove(key.removeprefix(f"{redone.url}/"))
    assert read_revisions(redone, RUN) == before
    assert verify(redone, RUN).findings == ()


@pytest.mark.parametrize("key", [RERUN(1), CHOICE(3)])
def test_a_second_copy_that_a_kill_left_out_is_written_by_the_next_process(redone, key):
    (copy,) = [one for one in redone.keys(layout.copy_folder(RUN)) if layout.copied(one) == key]
    redone.remove(copy)
    (finding,) = verify(redone, RUN).findings
    assert (finding.fault, finding.key, verify(redone, RUN).sound) == (Problem.UNCOPIED, key, True)
    keep_copies(redone, RUN)
    assert uncopied(redone, RUN) == []
    assert redone.read_bytes(copy) == redone.read_bytes(key)
    redone.replace(copy, b"damaged")
    assert [(one.fault, one.key) for one in verify(redone, RUN).findings] == [(Problem.DAMAGED, copy)]


@pytest.mark.parametrize("wrong", ["another digest", "another record"])
def test_a_second_copy_under_another_name_is_named(redone, wrong):
    copies = {layout.copied(one): one for one in redone.keys(layout.copy_folder(RUN))}
    twin = copies[RERUN(1)].replace("rerun-000001", "rerun-000002")
    twin = copies[RERUN(1)][:-21] + "0" * 16 + ".json" if wrong == "another digest" else twin
    copied(copies[RERUN(1)], twin)(redone)
    assert [(one.fault, one.key) for one in verify(redone, RUN).findings] == [(Problem.DAMAGED, twin)]
    assert read_revisions(redone, RUN).head == 2


def test_a_record_is_copied_by_whoever_writes_it(root):
    record_rerun(root, RUN, rerun(1, Stage.TRAIN, 1))
    record_choice(root, RUN, choice(1), 1)
    assert {layout.copied(key) for key in root.keys(layout.copy_folder(RUN))} == {RERUN(1), CHOICE(1)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["manifest", "piece", "attempt"])
def test_what_a_lost_rerun_made_is_not_taken_for_that_of_the_next(root, kind):
    make_run(root, RUN)
    writer = PartWriter(root, RUN, 2, Stage.ROLLOUT, 1)
    if kind == "manifest":
        commit(root, need(root, RUN, 2, Stage.ROLLOUT).model_copy(update={"revision": 1}))
    elif kind == "piece":
        keep_piece(writer, "00000", writer.write_bytes("groups.arrow", b"done"))
    else:
        begin(root, RUN, 2, Stage.ROLLOUT, "host:1", 1)
    for act in (asking, lambda root: choosing(root, 0)):
        with pytest.raises(WrongRecord, match=r"whose record run/revisions/rerun-000001.json is lost"):
            act(root)
    assert not verify(root, RUN).sound


def test_every_record_says_where_it_belongs(redone):
    writer = PartWriter(redone, RUN, 4, Stage.ROLLOUT)
    keep_piece(writer, "00000", writer.write_bytes("groups.arrow", b"done"))
    begin(redone, RUN, 4, Stage.ROLLOUT, "host:1")
    collect(redone, WORKFLOW, RUN, Retention(newest=1), apply=True)
    placed = [key for key in redone.keys(RUN) if key.endswith(".json") and not key.startswith(f"{RUN}/copies/")]
    assert {json.loads(redone.read_bytes(key))["place"] == key for key in placed} == {True}
    kinds = (
        "run.json",
        "lease/",
        "revisions/rerun-",
        "revisions/head-",
        ".retired.",
        ".pieces/",
        ".attempt-",
        "train.r1",
    )
    assert all(any(kind in key for key in placed) for kind in kinds)
    for key in placed:
        with pytest.raises(WrongRecord, match="copied or renamed"):
            unseal(redone.read_bytes(key), key, "run/elsewhere.json")
