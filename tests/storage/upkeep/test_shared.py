"""Parts that other runs name are found wherever they are named, without reading those runs repeatedly."""

import shutil
from pathlib import Path

import pytest

from storage import layout
from storage.backends.root import Root
from storage.manifest import Origin, commit, need
from storage.revisions import FIRST
from storage.upkeep.fork import fork
from storage.upkeep.retention import Retention, collect, give_up
from storage.upkeep.shared import SharedParts
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.counting import counting
from tests.storage.runs import DOCUMENT, age, make_iteration, make_run
from tests.storage.stepping import SharedStore, Stepper
from tests.storage.tables import manifest


def own_parts(root: Root, run: str, last: int) -> set[str]:
    """Keys of the parts that a run wrote in the iterations up to `last`."""
    places = ((key, layout.place_of(key)) for key in root.keys(layout.part_folder(run)))
    return {key for key, place in places if place is not None and place[0] <= last}


def test_a_fork_names_what_it_shares_and_no_other_run_does(any_root):
    make_run(any_root, "parent")
    make_run(any_root, "other", 1)
    fork(any_root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    make_iteration(any_root, "child", 3)
    found = SharedParts(any_root, "parent").look()
    assert found.parts() == own_parts(any_root, "parent", 2)
    assert found.unreadable == ()
    assert {layout.run_of(key) for key in found.manifests} == {"child"}
    assert SharedParts(any_root, "other").look().parts() == set()
    assert SharedParts(any_root, "child").look().parts() == set()


def test_a_fork_of_a_fork_names_the_parts_of_both(root):
    make_run(root, "parent")
    fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    make_iteration(root, "child", 2)
    fork(root, WORKFLOW, "child", 2, "grandchild", "c2", DOCUMENT)
    shutil.rmtree(Path(root.full("child/manifests")))
    assert SharedParts(root, "parent").look().parts() == own_parts(root, "parent", 1)
    assert SharedParts(root, "child").look().parts() == own_parts(root, "child", 2)


def test_a_fork_that_was_interrupted_names_what_it_has_published(root):
    make_run(root, "parent")
    fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    root.remove(layout.run_config_key("child"))
    assert SharedParts(root, "parent").look().parts() == own_parts(root, "parent", 2)


def test_a_state_is_found_at_whichever_iteration_it_is_named(root):
    # a run that begins with another run's state: its iteration 0 names state 2
    make_run(root, "parent")
    state = need(root, "parent", 2, Stage.TRAIN)
    origin = Origin(run="parent", digest=state.digest, config_digest=state.config_digest)
    commit(root, manifest(Stage.TRAIN, 0, state.parts, run="other", origin=origin))
    assert SharedParts(root, "parent").look().parts() == {part.key for part in state.parts}
    collect(root, WORKFLOW, "parent", Retention(newest=1), apply=True)
    assert root.exists(state.parts[0].key)
    assert not root.exists(need(root, "parent", 1, Stage.TRAIN).parts[0].key)


def test_folders_that_are_no_runs_are_left_alone(root):
    make_run(root, "parent")
    for folder in ("lost+found", "My Notes", ".git"):
        root.put_if_absent(f"{folder}/manifests/000000/train.r0.json", b"of something else")
    assert SharedParts(root, "parent").look().unreadable == ()


@pytest.mark.parametrize("content", [b"{}", None], ids=["damaged", "of a newer version"])
def test_what_cannot_be_read_is_named_with_its_run(root, content):
    make_run(root, "parent")
    key = make_unreadable(root, "other", content)
    (found,) = SharedParts(root, "parent").look().unreadable
    assert (found.run, found.key) == ("other", key)
    assert key in found.reason


def make_unreadable(root: Root, run: str, content: bytes | None) -> str:
    """A run with a damaged record in iteration 0 (or, without content, one of a newer version); returns its key."""
    make_run(root, run, 1)
    key = layout.manifest_key(run, 0, Stage.TRAIN, 0)
    newer = need(root, run, 0, Stage.TRAIN).model_copy(update={"format_version": 99})
    root.remove(key)
    if content is None:
        commit(root, newer)
    else:
        root.put_if_absent(key, content)
    return key


def test_damage_behind_what_a_run_can_share_is_not_met(root):
    make_run(root, "parent")
    make_run(root, "other", 3)
    fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    for iteration in (2, 3, 4):
        make_iteration(root, "child", iteration)
    root.replace(layout.manifest_key("other", 1, Stage.TRAIN, 0), b"{}")
    root.replace(layout.manifest_key("child", 4, Stage.TRAIN, 0), b"{}")
    found = SharedParts(root, "parent").look()
    assert (found.parts(), found.unreadable) == (own_parts(root, "parent", 1), ())


def test_a_process_that_looks_again_reads_what_is_new(root):
    make_run(root, "parent")
    fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    make_run(root, "other", 1)
    for run in ("child", "other"):
        age(root, layout.run_config_key(run))
    counted = counting(root)
    shared = SharedParts(counted, "parent")
    before = shared.look()
    assert max(counted.asked.values()) == 1
    counted.asked.clear()
    assert shared.look() == before
    assert counted.asked == {"info child/run.json": 1, "info other/run.json": 1}
    fork(root, WORKFLOW, "parent", 3, "late", "c1", DOCUMENT)
    counted.asked.clear()
    assert shared.look().parts() == own_parts(root, "parent", 3)
    assert {layout.run_of(asked.split(" ")[1]) for asked in counted.asked if asked.startswith("read")} == {"late"}
    # a young fork may still be in the making, so it is listed again, but what was read is not read again
    counted.asked.clear()
    shared.look()
    assert not any(asked.startswith("read") for asked in counted.asked)


def test_deleting_a_state_takes_few_requests(s3, s3_root):
    make_run(s3_root, "run", 2)
    make_run(s3_root, "other", 1)
    shared, asked = SharedParts(s3_root, "run"), []
    for iteration in (3, 4):
        make_iteration(s3_root, "run", iteration)
        before = len(s3.faults.requests)
        deleted = give_up(s3_root, WORKFLOW, "run", Retention(newest=2), iteration, shared=shared, revisions=FIRST)
        assert len(deleted.garbage) == 1
        asked.append(len(s3.faults.requests) - before)
    # names, parts and manifest of the state, the record, the runs, the deletion; of the other run two and its manifests
    assert asked == [6 + 2 + 3, 6 + 2]


def test_a_name_that_becomes_a_fork_later_is_seen(root):
    make_run(root, "parent")
    make_run(root, "child", 1)
    age(root, layout.run_config_key("child"))
    shared = SharedParts(root, "parent")
    assert shared.look().parts() == set()
    shutil.rmtree(root.full("child"))
    fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    assert shared.look().parts() == own_parts(root, "parent", 2)


def test_a_fork_of_a_fork_made_while_both_parents_clean_keeps_its_states():
    # the parent's retention stops after each of its store operations; then the child is forked and retires its copy
    for steps in range(1000):
        store = SharedStore()
        root = store.root()
        make_run(root, "parent", 2)
        fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
        make_iteration(root, "child", 3)
        gated = store.root(lambda: stepper)  # noqa: B023 - the stepper of this round
        stepper = Stepper(lambda gated=gated: collect(gated, WORKFLOW, "parent", Retention(newest=1), apply=True))
        collect(root, WORKFLOW, "parent", Retention(newest=1), apply=True)
        for _ in range(steps):
            stepper.step()
        finished = stepper.ended
        fork(root, WORKFLOW, "child", 3, "grandchild", "c2", DOCUMENT)
        collect(root, WORKFLOW, "child", Retention(newest=1), apply=True)
        while not stepper.ended:
            stepper.step()
        assert stepper.error is None
        missing = [
            part.key
            for iteration in range(4)
            for part in need(root, "grandchild", iteration, Stage.TRAIN).parts
            if not root.exists(layout.retired_key(layout.manifest_key("grandchild", iteration, Stage.TRAIN, 0)))
            and not root.exists(part.key)
        ]
        assert missing == [], steps
        if finished:
            break
    assert finished
