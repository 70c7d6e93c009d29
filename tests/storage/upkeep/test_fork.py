"""Forks share parts by reference and have their own history."""

from dataclasses import dataclass

import pytest

from storage import layout
from storage.backends.root import Root
from storage.errors import DigestMismatch, InputError, StorageError
from storage.manifest import commit, find, need
from storage.upkeep.catalog import contents, runs
from storage.upkeep.fork import check_past, check_unused, fork
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.flaky import flaky_root
from tests.storage.runs import DOCUMENT, make_iteration, make_run
from tests.storage.tables import manifest


def test_a_fork_goes_on_from_the_shared_past(any_root):
    make_run(any_root, "parent", iterations=3)
    before = set(any_root.keys("parent"))
    made = fork(any_root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    assert (made.iteration, made.manifests) == (
        2,
        len([m for m in contents(any_root, "parent").newest if m.iteration < 3]),
    )
    assert set(any_root.keys("parent")) == before
    assert any_root.keys("child/parts") == []
    assert made.shared_bytes > 0
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
    assert (mine.config_digest, mine.parts, mine.metrics) == ("c1", theirs.parts, theirs.metrics)
    assert need(root, "grandchild", 0, Stage.TRAIN).origin.run == "parent"


def test_a_fork_that_a_crash_cut_short_is_no_run_and_is_completed(root):
    make_run(root, "parent")
    fork(root, WORKFLOW, "parent", 2, "whole", "c1", DOCUMENT)
    some = contents(root, "whole").newest[:4]
    for one in some:
        inputs = {role: twin.digest for role, twin in _twins(root, one)}
        commit(root, one.model_copy(update={"run": "child", "inputs": inputs}))
    assert "child" not in runs(root)
    fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
    assert verify(root, "child").findings == ()


def _twins(root, one):
    by_digest = {m.digest: m for m in contents(root, "whole").newest}
    for role, digest in one.inputs.items():
        stage = by_digest[digest]
        yield role, need(root, "child", stage.iteration, stage.stage)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nobody", 1, "child"), "no run 'nobody'.* only parent, taken"),
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
    with pytest.raises(InputError, match="begun as another fork"):
        fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)


def test_a_broken_chain_is_not_shared(root):
    make_run(root, "parent")
    root.remove(layout.manifest_key("parent", 1, Stage.REWARD, 0))
    with pytest.raises(StorageError, match="made from a reward"):
        fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)


def test_a_fork_does_not_continue_from_what_a_longer_one_has_left(root):
    make_run(root, "parent")
    fork(root, WORKFLOW, "parent", 3, "child", "c1", DOCUMENT)
    root.remove(layout.run_config_key("child"))  # as if killed just before
    with pytest.raises(InputError, match=r"begun as another fork, which left child/manifests/000002"):
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
    parent.fs.script = iter(["ok"] * writes + ["lost server error"])
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
        fork(Raced(root.url, root.fs, root.path, root.protocol), WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)


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


def test_a_past_of_another_configuration_is_refused(root):
    make_run(root, "parent", 1)
    check_past(root, "parent", {"c0"})
    check_past(root, "nobody", {"c0"})
    fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    check_past(root, "child", {"c0", "c1"})
    with pytest.raises(InputError, match=r"shared with run parent\) belongs to configuration c1, .* started with c2"):
        check_past(root, "child", {"c2"})


def test_a_taken_over_retirement_says_which_manifest_it_is_of(root):
    make_run(root, "parent")
    collect(root, WORKFLOW, "parent", Retention(newest=1), apply=True)
    fork(root, WORKFLOW, "parent", 3, "child", "c1", DOCUMENT)
    stored = contents(root, "child")
    assert len(stored.retired) == 2
    assert all(record.manifest == stored.manifests[key].digest for key, record in stored.retired.items())
