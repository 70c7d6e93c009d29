"""`read_status` finds the progress of a run from storage alone."""

import pytest

from flows.views.curves import store_plot
from flows.views.status import SHORT, Change, read_status
from storage import layout
from storage.backends.root import Root
from storage.errors import InputError
from tasks.stages.names import WORKFLOW, Stage
from tests.flows.runs import MakeRun


def test_a_run_in_work(make_run: MakeRun, root: Root):
    make_run("a", 2, (Stage.ROLLOUT, Stage.REWARD))
    status = read_status(root, "a")
    assert (status.iterations, status.asked, status.complete, status.current) == (2, 4, False, 3)
    assert [(item.stage.value, item.done) for item in status.stages] == [
        ("rollout", True),
        ("reward", True),
        ("train", False),
        ("weight-sync", False),
        ("evaluate", False),
    ]
    assert status.changes.reward == Change(first=0.5, last=1.0, since=1)
    assert status.changes.held_out_reward == Change(first=0.5, last=1.5, since=0)
    assert status.changes.pass_rate == Change()
    assert status.report is None


def test_a_run_that_has_just_begun(make_run: MakeRun, root: Root):
    make_run("a", -1)
    status = read_status(root, "a")
    assert (status.iterations, status.current, status.complete, status.history) == (0, 0, False, ())
    assert [item.stage.value for item in status.stages] == ["prepare", "train", "weight-sync", "evaluate"]
    assert status.changes.held_out_reward == Change()


@pytest.mark.parametrize("iterations", [4, 7])
def test_a_complete_run(make_run: MakeRun, root: Root, iterations: int):
    make_run("a", iterations)
    store_plot(root, "a", [record.row for record in read_status(root, "a").history])
    status = read_status(root, "a")
    assert status.complete
    assert status.current is None
    assert status.iterations == iterations
    assert status.stages == ()
    assert status.report is not None
    assert root.exists(status.report.removeprefix(f"{root.url}/"))


def test_an_unknown_run_is_refused(make_run: MakeRun, root: Root):
    make_run("a", 1)
    with pytest.raises(InputError, match="no run 'b' in file://"):
        read_status(root, "b")


def test_the_status_of_a_long_run_says_that_its_first_iteration_is_lost(make_run: MakeRun, root: Root):
    make_run("a", SHORT + 2)
    for stage in map(Stage, WORKFLOW.stages_of(0)):
        root.remove(layout.manifest_key("a", 0, stage, 0))
    status = read_status(root, "a")
    assert (status.complete, status.current, status.history, status.iterations) == (False, None, (), 0)
    assert "manifests/000000/prepare.r0.json is lost" in status.warnings[0]
