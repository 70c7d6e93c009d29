"""A run that begins with one state of another: its shared and copied records, and their retention."""

from dataclasses import dataclass

import pytest

from storage import layout
from storage.backends.root import Root
from storage.errors import InputError
from storage.manifest import find, need
from storage.ownership.lease import hold
from storage.parts import read_part
from storage.upkeep.catalog import runs
from storage.upkeep.fork import branch
from storage.upkeep.removal import remove
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import verify
from tasks.stages.names import RETRAINING, WORKFLOW, Stage
from tests.storage.runs import DOCUMENT, make_run, put


def begin(root: Root, run: str = "new", iteration: int = 2, source: Root | None = None):
    return branch(source or root, WORKFLOW, "run", iteration, root, run, "c1", DOCUMENT)


@pytest.mark.slow
def test_iteration_0_is_the_state_under_manifests_of_its_own(any_root):
    make_run(any_root)
    made = begin(any_root)
    prepared, state = (need(any_root, "new", 0, stage) for stage in (Stage.PREPARE, Stage.TRAIN))
    original = need(any_root, "run", 2, Stage.TRAIN)
    assert (state.facts, state.inputs) == (original.facts, {"prepare": prepared.digest})
    assert [(one.name, one.digest) for one in state.parts] == [(one.name, one.digest) for one in original.parts]
    assert (state.origin.run, state.origin.digest, state.config_digest) == ("run", original.digest, "c1")
    assert (made.linked, made.iteration) == (any_root.folder is not None, 2)
    assert any_root.keys("new/parts") == sorted(part.key for one in (prepared, state) for part in one.parts)
    assert verify(any_root, "new").findings == ()


@pytest.mark.slow
def test_a_state_of_another_root_is_copied_and_then_needs_nothing_there(root, s3_root):
    make_run(s3_root)
    assert not begin(root, source=s3_root).linked
    for stage, iteration in ((Stage.PREPARE, 0), (Stage.TRAIN, 2)):
        ours, theirs = need(root, "new", 0, stage), need(s3_root, "run", iteration, stage)
        assert [(part.name, part.digest, part.rows) for part in ours.parts] == [
            (part.name, part.digest, part.rows) for part in theirs.parts
        ]
        assert all(part.key.startswith("new/") for part in ours.parts)
        assert [read_part(root, part) for part in ours.parts] == [read_part(s3_root, part) for part in theirs.parts]
    assert verify(root, "new").findings == ()


def test_retention_and_removal_of_the_source_do_no_harm(root):
    make_run(root)
    begin(root, iteration=1)
    deleted = collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
    assert {layout.place_of(one.key) for one in deleted.garbage} == {(1, "train"), (2, "train")}
    with hold(root, "run", "test") as lease:
        remove(root, "run", lease)
    assert verify(root, "new").findings == ()


def test_a_state_that_retention_has_deleted_is_refused(root):
    make_run(root)
    collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
    with pytest.raises(InputError, match=r"iteration 1 of run 'run' is not kept; those of \[0, 3\] are"):
        begin(root, iteration=1)
    assert runs(root) == ["run"]


@pytest.mark.parametrize("between", [True, False])
def test_retention_that_comes_before_the_copy_is_seen_and_later_does_no_harm(root, between):
    make_run(root)

    @dataclass(frozen=True)
    class Retiring(Root):
        def copy(self, source, key):
            if between:
                collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
            super().copy(source, key)
            collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)

    retiring = Retiring(root.url, root.backend)
    if not between:
        begin(retiring, iteration=3)
        assert verify(root, "new").findings == ()
        return
    with pytest.raises(InputError, match="is not kept"):
        begin(retiring, iteration=1)
    assert runs(root) == ["run"]


class KilledError(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["put_if_absent", "copy"])
@pytest.mark.parametrize("after", range(4))
def test_a_beginning_that_was_cut_short_is_completed(root, kind, after):
    make_run(root)
    left = [after]

    @dataclass(frozen=True)
    class Killing(Root):
        def _count(self, call):
            if call == kind:
                if not left[0]:
                    raise KilledError
                left[0] -= 1

        def put_if_absent(self, key, data, durable=True):
            self._count("put_if_absent")
            return super().put_if_absent(key, data, durable)

        def copy(self, source, key):
            self._count("copy")
            super().copy(source, key)

    killing = Killing(root.url, root.backend)
    try:
        begin(killing)
    except KilledError:
        assert "new" not in runs(root)
        begin(root)
    assert verify(root, "new").findings == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "iteration", "words"),
    [
        ("new", 9, "no train state of iteration 9, only those"),
        ("run", 2, "already exists"),
        ("fork", 1, "already exists"),
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


@pytest.mark.slow
def test_a_run_on_stored_samples_has_its_own_retention(root):
    make_run(root)
    begin(root)
    prepared, state = (need(root, "new", 0, stage) for stage in (Stage.PREPARE, Stage.TRAIN))
    for iteration in (1, 2, 3):
        state = put(root, "new", iteration, Stage.TRAIN, {"prepare": prepared, "state": state}, data=b"%d" % iteration)
    kept = {one.key for one in collect(root, RETRAINING, "new", Retention(newest=1), apply=True).garbage}
    assert {layout.place_of(key) for key in kept} == {(1, "train"), (2, "train")}
    assert verify(root, "new").sound
