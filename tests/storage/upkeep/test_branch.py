"""A run that begins with one state of another: what it shares, what it copies, and that retention knows."""

import pytest

from storage import layout
from storage.backends.root import Root
from storage.errors import InputError
from storage.manifest import commit, find, need
from storage.ownership.lease import hold
from storage.parts import read_part
from storage.upkeep.branch import branch
from storage.upkeep.catalog import runs
from storage.upkeep.removal import remove
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import verify
from tasks.stages.names import RETRAINING, WORKFLOW, Stage
from tests.storage.runs import DOCUMENT, age, make_run, put


def begin(root: Root, run: str = "new", iteration: int = 2, source: Root | None = None):
    return branch(source or root, WORKFLOW, "run", iteration, root, run, "c1", DOCUMENT)


def test_iteration_0_is_the_state_under_manifests_of_its_own(any_root):
    make_run(any_root)
    made = begin(any_root)
    prepared, state = (need(any_root, "new", 0, stage) for stage in (Stage.PREPARE, Stage.TRAIN))
    original = need(any_root, "run", 2, Stage.TRAIN)
    assert (state.parts, state.facts, state.inputs) == (original.parts, original.facts, {"prepare": prepared.digest})
    assert (state.origin.run, state.origin.digest, state.config_digest) == ("run", original.digest, "c1")
    assert (made.copied, made.iteration) == (False, 2)
    assert any_root.keys("new/parts") == []
    assert verify(any_root, "new").findings == ()


def test_a_state_of_another_root_is_copied_and_then_needs_nothing_there(root, s3_root):
    make_run(s3_root)
    assert begin(root, source=s3_root).copied
    for stage, iteration in ((Stage.PREPARE, 0), (Stage.TRAIN, 2)):
        ours, theirs = need(root, "new", 0, stage), need(s3_root, "run", iteration, stage)
        assert [(part.name, part.digest, part.rows) for part in ours.parts] == [
            (part.name, part.digest, part.rows) for part in theirs.parts
        ]
        assert all(layout.is_part_of(part.key, "new") for part in ours.parts)
        assert [read_part(root, part) for part in ours.parts] == [read_part(s3_root, part) for part in theirs.parts]
    assert verify(root, "new").findings == ()


def test_retention_and_removal_of_the_source_keep_what_is_named(root):
    make_run(root)
    begin(root, iteration=1)
    state = need(root, "run", 1, Stage.TRAIN)
    for part in state.parts:
        age(root, part.key)
    deleted = collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
    assert {one.key for one in deleted.garbage} == {part.key for part in need(root, "run", 2, Stage.TRAIN).parts}
    assert verify(root, "new").sound
    with hold(root, "run", "test") as lease, pytest.raises(InputError, match="new uses its parts"):
        remove(root, "run", lease)


def test_a_state_that_retention_has_deleted_is_refused(root):
    make_run(root)
    collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
    with pytest.raises(InputError, match=r"iteration 1 of run 'run' is not kept; those of \[0, 3\] are"):
        begin(root, iteration=1)
    assert runs(root) == ["run"]


def test_retention_that_comes_between_is_seen(root, monkeypatch):
    """The state is retired after it was looked at, and before its copy is published."""
    make_run(root)
    from storage.upkeep import branch as module

    def late(*given):
        collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
        return commit(*given)

    monkeypatch.setattr(module, "commit", late)
    with pytest.raises(InputError, match="is not kept"):
        begin(root, iteration=1)
    assert runs(root) == ["run"]


@pytest.mark.parametrize("published", [0, 1, 2])
def test_a_beginning_that_was_cut_short_is_completed(root, published):
    make_run(root)
    begin(root, "whole")
    for stage in (Stage.PREPARE, Stage.TRAIN)[:published]:
        one = need(root, "whole", 0, stage)
        inputs = {role: need(root, "new", 0, Stage.PREPARE).digest for role in one.inputs}
        commit(root, one.model_copy(update={"run": "new", "inputs": inputs}))
    assert "new" not in runs(root)
    begin(root)
    assert verify(root, "new").findings == ()
    assert need(root, "new", 0, Stage.TRAIN).parts == need(root, "whole", 0, Stage.TRAIN).parts


@pytest.mark.parametrize(
    ("run", "iteration", "words"),
    [
        ("new", 9, "no train state of iteration 9, only those"),
        ("run", 2, "begun otherwise"),
        ("fork", 1, "begun other"),
    ],
)
def test_what_cannot_begin_is_refused(root, run, iteration, words):
    make_run(root)
    begin(root, "fork", 2)
    with pytest.raises(InputError, match=words):
        begin(root, run, iteration)


def test_something_else_under_the_name_is_refused(root):
    make_run(root)
    put(root, "new", 1, Stage.ROLLOUT, {})
    with pytest.raises(InputError, match=r"ratchet rm new"):
        begin(root)
    assert find(root, "new", 1, Stage.ROLLOUT) is not None


def test_a_run_on_stored_samples_has_its_own_retention(root):
    make_run(root)
    begin(root)
    prepared, state = (need(root, "new", 0, stage) for stage in (Stage.PREPARE, Stage.TRAIN))
    for iteration in (1, 2, 3):
        state = put(root, "new", iteration, Stage.TRAIN, {"prepare": prepared, "state": state}, data=b"%d" % iteration)
    kept = {one.key for one in collect(root, RETRAINING, "new", Retention(newest=1), apply=True).garbage}
    assert {layout.place_of(key) for key in kept} == {(1, "train"), (2, "train")}
    assert verify(root, "new").sound
