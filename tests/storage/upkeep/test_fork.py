"""Forks have their parent's past in parts of their own, and their own history."""

import errno
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from storage import layout
from storage.backends.root import Root
from storage.errors import DigestMismatch, InputError, PartMissing, StorageError
from storage.manifest import commit, find, need
from storage.upkeep.beside import collect_beside
from storage.upkeep.catalog import contents, runs
from storage.upkeep.fork import check_past, check_unused, fork
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.flaky import flaky_root
from tests.storage.harm import changed
from tests.storage.runs import DOCUMENT, age, make_iteration, make_run
from tests.storage.stepping import SharedStore, Stepper
from tests.storage.tables import manifest

LATER = datetime.now(UTC) + timedelta(days=2)


@pytest.mark.slow
def test_a_fork_goes_on_from_the_shared_past(any_root):
    make_run(any_root, "parent", iterations=3)
    before = set(any_root.keys("parent"))
    made = fork(any_root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    assert (made.iteration, made.manifests) == (
        2,
        len([m for m in contents(any_root, "parent").newest if m.iteration < 3]),
    )
    assert set(any_root.keys("parent")) == before
    assert len(any_root.keys("child/parts")) == len([key for key in before if "/parts/" in key and "000003" not in key])
    assert made.bytes == sum(one.bytes for one in any_root.stored("child/parts"))
    assert made.linked == (any_root.folder is not None)
    make_iteration(any_root, "child", 3)
    for report in (verify(any_root, "child"), verify(any_root, "parent")):
        assert report.findings == ()
    assert find(any_root, "child", 3, Stage.TRAIN).inputs["state"] == find(any_root, "child", 2, Stage.TRAIN).digest


def test_each_shared_manifest_says_where_it_comes_from(root):
    make_run(root, "parent", iterations=1)
    fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    fork(root, WORKFLOW, "child", 0, "grandchild", "c2", DOCUMENT)
    theirs, mine = (need(root, run, 1, Stage.TRAIN) for run in ("parent", "child"))
    assert (mine.origin.run, mine.origin.digest, mine.origin.config_digest) == ("parent", theirs.digest, "c0")
    assert (mine.config_digest, mine.metrics) == ("c1", theirs.metrics)
    assert [(part.name, part.digest) for part in mine.parts] == [(part.name, part.digest) for part in theirs.parts]
    assert all(part.key.startswith("child/parts/000001/train/") for part in mine.parts)
    assert need(root, "grandchild", 0, Stage.TRAIN).origin.run == "parent"


@pytest.mark.slow
def test_a_fork_that_a_crash_cut_short_is_no_run_and_is_completed(root):
    make_run(root, "parent")
    fork(root, WORKFLOW, "parent", 2, "whole", "c1", DOCUMENT)
    whole = content_of(root, "whole")
    # killed before and after each of its store operations in turn, in an object store
    for steps in range(1000):
        store = SharedStore()
        make_run(store.root(), "parent")
        gated = store.root(lambda: stepper)  # noqa: B023 - the stepper of this round
        stepper = Stepper(lambda gated=gated: fork(gated, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT))
        for _ in range(steps):
            stepper.step()
        finished = stepper.ended
        if not finished:
            stepper.kill()
            collect(store.root(), WORKFLOW, "child", apply=True, now=LATER)
            if "child" not in runs(store.root()):
                fork(store.root(), WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
        for run in ("parent", "child"):
            assert verify(store.root(), run).findings == (), (steps, run)
        assert content_of(store.root(), "child") == whole
        if finished:
            break
    assert finished


def content_of(root: Root, run: str) -> list[tuple]:
    """Content that does not depend on the name of a run."""
    return [
        (one.iteration, one.stage, one.origin, [(part.name, part.digest, part.bytes) for part in one.parts])
        for one in contents(root, run).newest
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nobody", 1, "child"), "no run 'nobody'.* which has parent, taken"),
        (("parent", 4, "child"), "iteration 4 of run 'parent' is not complete; iterations 0 to 3 are"),
        (("parent", 1, "taken"), "'taken' already exists in"),
        (("parent", 1, "Not a name"), "cannot be used"),
    ],
)
def test_what_cannot_be_forked_is_refused(root, arguments, reason):
    make_run(root, "parent")
    make_run(root, "taken", 0)
    parent, iteration, run = arguments
    with pytest.raises(InputError, match=reason) as refusal:
        fork(root, WORKFLOW, parent, iteration, run, "c1", DOCUMENT)
    assert refusal.value.exit_code == 2


@pytest.mark.slow
def test_an_iteration_whose_state_is_not_kept_is_refused(root):
    make_run(root, "parent", iterations=4)
    collect(root, WORKFLOW, "parent", Retention(newest=1), apply=True)
    with pytest.raises(InputError, match=r"iteration 2 of run 'parent' is not kept; those of \[0, 4\] are"):
        fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    assert "child" not in runs(root)
    fork(root, WORKFLOW, "parent", 4, "other", "c1", DOCUMENT)
    assert verify(root, "other").findings == ()


def test_a_name_that_was_begun_otherwise_is_refused(root):
    make_run(root, "parent")
    commit(root, manifest(Stage.PREPARE, 0, run="child"))
    with pytest.raises(InputError, match="begun differently"):
        fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)


def test_a_broken_chain_is_not_shared(root):
    make_run(root, "parent")
    changed(layout.manifest_key("parent", 1, Stage.REWARD, 0), facts={"made": "elsewhere"})(root)
    with pytest.raises(StorageError, match="made from a reward"):
        fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)


def test_a_fork_does_not_continue_from_what_a_longer_one_has_left(root):
    make_run(root, "parent")
    fork(root, WORKFLOW, "parent", 3, "child", "c1", DOCUMENT)
    root.remove(layout.run_config_key("child"))  # as if killed just before
    with pytest.raises(InputError, match=r"begun differently, which left child/manifests/000002"):
        fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    assert "child" not in runs(root)
    assert fork(root, WORKFLOW, "parent", 3, "child", "c1", DOCUMENT).iteration == 3


def test_a_run_can_be_forked_before_the_iteration_where_it_is_damaged(root):
    make_run(root, "parent")
    root.replace(layout.manifest_key("parent", 3, Stage.TRAIN, 0), b"{}")
    fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    assert verify(root, "child").findings == ()
    with pytest.raises(DigestMismatch, match="parent/manifests/000003/train"):
        fork(root, WORKFLOW, "parent", 3, "other", "c1", DOCUMENT)


def test_a_fork_whose_last_answer_was_lost_is_made():
    parent = flaky_root()
    make_run(parent, "parent", 1)
    writes = 7  # manifests of iterations 0 and 1
    parent.backend.fs.script = iter(["ok"] * writes + ["lost server error"])
    fork(parent, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    assert verify(parent, "child").sound


def test_a_name_that_another_process_takes_meanwhile_is_refused(root):
    make_run(root, "parent", 1)

    @dataclass(frozen=True)
    class Raced(Root):
        def put_if_absent(self, key, data, durable=True):
            if key == layout.run_config_key("child"):
                super().put_if_absent(key, b"another configuration")
            return super().put_if_absent(key, data, durable)

    with pytest.raises(InputError, match="just made by another process"):
        fork(Raced(root.url, root.backend), WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)


def test_a_name_with_manifests_but_no_configuration_is_no_new_run(root):
    check_unused(root, "child")
    make_run(root, "parent", 1)
    fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    root.remove(layout.run_config_key("child"))
    with pytest.raises(
        InputError, match=r"has no child/run.json .* 7 manifests.* a fork that was interrupted"
    ) as refusal:
        check_unused(root, "child")
    assert refusal.value.exit_code == 2


def test_parts_alone_take_no_name(root):
    """A start that was killed while it replaced its configuration has left them, and continues."""
    make_run(root, "parent", 1)
    for part in need(root, "parent", 1, Stage.TRAIN).parts:
        root.copy(part.key, f"child/{part.key.partition('/')[2]}")
    check_unused(root, "child")


def test_a_past_of_another_configuration_is_refused(root):
    make_run(root, "parent", 1)
    check_past(root, "parent", {"c0"})
    check_past(root, "nobody", {"c0"})
    fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    check_past(root, "child", {"c0", "c1"})
    with pytest.raises(InputError, match=r"taken from run parent\) belongs to configuration c1, .* started with c2"):
        check_past(root, "child", {"c2"})


def test_a_taken_over_retirement_says_which_manifest_it_is_of(root):
    make_run(root, "parent")
    collect(root, WORKFLOW, "parent", Retention(newest=1), apply=True)
    fork(root, WORKFLOW, "parent", 3, "child", "c1", DOCUMENT)
    stored = contents(root, "child")
    assert len(stored.retired) == 2
    assert all(record.manifest == stored.manifests[key].digest for key, record in stored.retired.items())


def test_what_it_will_take_is_said_before_anything_is_copied(any_root):
    make_run(any_root, "parent", 1)
    said = []

    def announce(text):
        said.append((text, any_root.keys("child")))

    made = fork(any_root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT, None, announce)
    how = "as hard links, which take no space" if made.linked else "to be copied"
    size = f"{made.bytes / 2**20:.1f} MiB of parts, {how}"
    assert said == [(f"run child takes {made.manifests} stages from run parent: {size}", [])]


def test_a_fork_outlives_its_parent_in_every_store(any_root):
    make_run(any_root, "parent")
    fork(any_root, WORKFLOW, "parent", 3, "child", "c1", DOCUMENT)
    fork(any_root, WORKFLOW, "child", 2, "grandchild", "c2", DOCUMENT)
    for key in any_root.keys("parent"):
        any_root.remove(key)
    collect(any_root, WORKFLOW, "child", Retention(newest=1), apply=True)
    for run in ("child", "grandchild"):
        assert verify(any_root, run).findings == ()
    assert need(any_root, "grandchild", 2, Stage.TRAIN).origin.run == "parent"


def test_a_local_fork_takes_no_space(root):
    make_run(root, "parent", 1)
    fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    mine, theirs = (need(root, run, 1, Stage.TRAIN).parts[0].key for run in ("child", "parent"))
    assert root.backend.full(mine).samefile(root.backend.full(theirs))


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_a_root_that_makes_no_such_link_copies(root, monkeypatch, error):
    make_run(root, "parent", 1)
    link = os.link

    def refusing(source, target):
        if "/parent/parts/" in str(source):
            raise OSError(error, os.strerror(error))
        link(source, target)

    monkeypatch.setattr(os, "link", refusing)
    fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    mine, theirs = (need(root, run, 1, Stage.TRAIN).parts[0].key for run in ("child", "parent"))
    assert not root.backend.full(mine).samefile(root.backend.full(theirs))
    assert verify(root, "child").findings == ()


def test_a_cleaner_beside_a_fork_takes_no_links_however_old_their_originals_are(root):
    make_run(root, "parent", 2)
    for key in root.keys("parent/parts"):
        age(root, key)

    @dataclass(frozen=True)
    class Cleaned(Root):
        """Cleans the run in the making at each step."""

        def put_if_absent(self, key, data, durable=True):
            for clean in (
                lambda: collect(root, WORKFLOW, "child", apply=True),
                lambda: collect_beside(root, WORKFLOW, "child"),
            ):
                assert clean().garbage == ()
            return super().put_if_absent(key, data, durable)

    fork(Cleaned(root.url, root.backend), WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    assert verify(root, "child").findings == ()
    assert collect(root, WORKFLOW, "child", apply=True).garbage == ()


def test_a_part_that_is_lost_ends_the_fork_and_nothing_begins(root):
    make_run(root, "parent")
    lost = need(root, "parent", 2, Stage.ROLLOUT).parts[0].key
    root.remove(lost)
    with pytest.raises(PartMissing, match=f"lacks a part: .*{lost}.* Choose an iteration before it"):
        fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    assert runs(root) == ["parent"]
    fork(root, WORKFLOW, "parent", 1, "other", "c1", DOCUMENT)


def test_a_large_object_is_copied_in_parts(s3, s3_root, monkeypatch):
    monkeypatch.setattr("s3fs.core.MANAGED_COPY_THRESHOLD", 1000)
    s3_root.put_if_absent("a", bytes(6_000_000))
    before = len(s3.faults.requests)
    s3_root.copy("a", "b")
    assert any("partNumber=1" in one for one in s3.faults.requests[before:])
    assert s3_root.read_bytes("b") == bytes(6_000_000)
