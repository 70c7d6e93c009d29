"""Processes that redo a finished stage are really killed, at each point."""

import shutil
from pathlib import Path

import pytest

from flows.driving import rerun
from flows.proof.faults import Fault
from storage.kill_points import Point
from storage.revisions import read_revisions
from storage.upkeep.redoing import Wanted
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tests.faults.running import SmallRun
from tests.faults.small_run import RUN

AT = 1


@pytest.fixture(scope="module")
def finished(launcher, tmp_path_factory) -> SmallRun:
    run = SmallRun(launcher, tmp_path_factory.mktemp("finished") / "run")
    assert run.attempt().code == 0
    return run


@pytest.fixture(scope="module")
def redone(launcher, finished: SmallRun, tmp_path_factory) -> dict:
    """Result of the run if nothing is killed."""
    run = copied(launcher, finished, tmp_path_factory.mktemp("redone"))
    assert run.attempt().code == 0
    return run.look().digests


def copied(launcher, finished: SmallRun, folder: Path) -> SmallRun:
    """The finished run, whose rollout is to be redone."""
    run = SmallRun(launcher, folder / "run")
    shutil.copytree(finished.root.folder, run.root.folder)
    rerun(run.root, RUN, Wanted(AT, Stage.ROLLOUT, "a test", "tests", new_seeds=True))
    return run


@pytest.mark.parametrize(
    ("stage", "point"),
    [
        pytest.param(Stage.ROLLOUT, Point.STARTED, marks=pytest.mark.slow),
        pytest.param(Stage.ROLLOUT, Point.MID_PART, marks=pytest.mark.slow),
        pytest.param(Stage.ROLLOUT, Point.PARTS_DONE, marks=pytest.mark.slow),
        (Stage.ROLLOUT, Point.COMMITTED),  # done, and not chosen
        (Stage.TRAIN, Point.UPLOAD),  # in the cascade
        pytest.param(Stage.TRAIN, Point.COMMITTED, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rerun_ends_as_one_that_is_left_alone(
    launcher, finished: SmallRun, redone: dict, tmp_path: Path, stage: Stage, point: Point
):
    run = copied(launcher, finished, tmp_path)
    before = run.look().digests
    first = run.attempt(Fault(stage, AT, point))
    assert first.code < 0
    assert len(first.delivered) == 1
    if stage is Stage.ROLLOUT:
        assert run.look().digests == before  # the head is chosen when its stage is done
    last = run.attempt()
    assert last.code == 0, last.messages
    assert last.bodies[AT, Stage.ROLLOUT] == (stage is Stage.ROLLOUT and point is not Point.COMMITTED)
    assert run.look().digests == redone != before
    revisions = read_revisions(run.root, RUN)
    assert (len(revisions.reruns), [choice.revision for choice in revisions.choices]) == (1, [1])
    assert verify(run.root, RUN).sound
