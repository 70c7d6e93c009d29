"""Forks share parts by reference and have a history of their own."""

import pytest

from storage import layout
from storage.errors import InputError, StorageError
from storage.manifest import commit, find, need
from storage.upkeep.catalog import contents, runs
from storage.upkeep.fork import fork
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.runs import DOCUMENT, make_iteration, make_run
from tests.storage.stepping import SharedStore, Stepper
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
        (("parent", 1, "taken"), "'taken' is in .* already"),
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
    with pytest.raises(InputError, match="begun as a fork of something else"):
        fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)


def test_a_broken_chain_is_not_shared(root):
    make_run(root, "parent")
    root.remove(layout.manifest_key("parent", 1, Stage.REWARD, 0))
    with pytest.raises(StorageError, match="made from a reward"):
        fork(root, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)


@pytest.mark.parametrize("interrupted", ["fork", "retention"])
def test_a_fork_and_a_retention_at_the_same_moment_see_each_other(interrupted):
    # one of them stands still after each of its store operations in turn, while the other does all of its work
    outcomes = set()
    for steps in range(400):
        store = SharedStore()
        root, refused = store.root(), []
        make_run(root, "parent", iterations=3)
        gated = store.root(lambda: stepper)  # noqa: B023 - the stepper of this round

        def make_fork(at, refused=refused):
            try:
                fork(at, WORKFLOW, "parent", 2, "child", "c1", DOCUMENT)
            except InputError as error:
                refused.append(error)

        def retain(at):
            collect(at, WORKFLOW, "parent", Retention(newest=1), apply=True)

        first, second = (make_fork, retain) if interrupted == "fork" else (retain, make_fork)
        stepper = Stepper(lambda first=first, gated=gated: first(gated))
        for _ in range(steps):
            stepper.step()
        second(root)
        finished = stepper.ended
        while not stepper.ended:
            stepper.step()
        assert stepper.error is None
        kept = root.exists(need(root, "parent", 2, Stage.TRAIN).parts[0].key)
        assert kept or refused
        assert refused or verify(root, "child").sound
        outcomes.add((kept, bool(refused)))
        if finished:
            break
    assert finished
    assert {(True, False), (False, True)} <= outcomes
