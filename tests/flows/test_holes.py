"""A stage that is lost from the past of a run: starts, forks and reruns refuse with a repair, and the status warns."""

import functools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli.app import execute
from flows.driving import rerun
from flows.views.status import read_status
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import WrongRecord
from storage.kill_points import Point
from storage.manifest import need
from storage.revisions import read_revisions
from storage.upkeep.redoing import Wanted
from storage.upkeep.verify import verify
from tasks.config.stored import stored_config
from tasks.forking import begin_retraining, make_fork, retrain_config
from tasks.stages.names import LOOP, Stage
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.stored import copied, driven_once

LAST = 5
SYNC = Stage.WEIGHT_SYNC
left_to_ci = functools.partial(pytest.param, marks=pytest.mark.slow)


def drive(root: Root, folder: Path, *settings: str, run: str = RUN, last: int = LAST, **more):
    asked = [f"run.iterations={last}", "evaluate.every=2", *settings]
    process = driver(root, small_config(asked), folder / "scratch", run=run, **more)
    process.drive()
    return process.done


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Callable[..., Root]:
    """A run with these settings, driven once; only copies of it are changed."""
    return driven_once(tmp_path_factory, drive)


def lose(root: Root, *places: tuple[int, Stage], run: str = RUN) -> None:
    seen = read_revisions(root, run)
    for place in places:
        root.remove(layout.manifest_key(run, *place, seen.of(*place)))


def committed(root: Root, run: str) -> list[str]:
    """All that a run has stored, but for its lease."""
    return [key for key in root.keys(run) if layout.lease_number(key) is None]


def refused(root: Root, folder: Path, capfd, *settings: str, run: str = RUN) -> str:
    """The words with which everything behind a hole is refused; nothing is stored by that."""
    before = committed(root, run)
    status = read_status(root, run)
    assert (status.complete, status.current, status.stages) == (False, None, ())
    said = status.warnings[0]
    for last in (LAST, LAST + 1):
        with pytest.raises(WrongRecord) as error:
            drive(root, folder, *settings, run=run, last=last)
        assert str(error.value) == said
    with pytest.raises(WrongRecord) as error:
        make_fork(root, run, LAST, "after")
    assert str(error.value) == said
    with pytest.raises(WrongRecord) as error:
        rerun(root, run, Wanted(LAST, Stage.REWARD, "to see", "tests", ahead=stored_config(root, run).rollout.ahead))
    assert str(error.value) == said
    assert execute(["status", run, f"--root={root.url}"]) == 0
    assert said in capfd.readouterr().out
    assert execute(["status", run, f"--root={root.url}", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert (shown["complete"], shown["warnings"][0]) == (False, said)
    assert committed(root, run) == before
    assert not root.keys("after")
    return said


def repaired(root: Root, folder: Path, said: str, *settings: str, run: str = RUN) -> int:
    """Execute the command of the message as it is printed, and do the new run; the iteration that it goes on from."""
    (command,) = re.findall(r"`(ratchet fork .*?)`", said)
    assert execute(shlex.split(command)[1:]) == 0
    made = f"{run}-fork"
    done = drive(root, folder / "repair", *settings, run=made)
    assert read_status(root, made).complete
    assert verify(root, made).sound
    return min(iteration for iteration, _, reused in done if not reused) - 1


def states(root: Root, run: str) -> list[list[tuple[str, str]]]:
    return [[(one.name, one.digest) for one in need(root, run, at, Stage.TRAIN).parts] for at in range(LAST + 1)]


@pytest.mark.parametrize("stage", [Stage.ROLLOUT, left_to_ci(Stage.REWARD), Stage.TRAIN, left_to_ci(SYNC)])
@pytest.mark.parametrize("iteration", [left_to_ci(1), 3])
def test_a_stage_that_is_lost_in_the_middle_is_named_with_a_repair(finished, tmp_path, capfd, iteration, stage):
    root = copied(finished(), tmp_path / "runs")
    lose(root, (iteration, stage))
    assert not verify(root, RUN).sound
    said = refused(root, tmp_path, capfd)
    assert f"{root.url}/{layout.manifest_key(RUN, iteration, stage, 0)} is lost: run 'small' has stages" in said
    assert f"made from {stage} of iteration {iteration}." in said
    assert read_status(root, RUN).iterations == iteration - 1
    assert repaired(root, tmp_path, said) == iteration - 1
    assert states(root, f"{RUN}-fork") == states(finished(), RUN)


def test_the_command_line_refuses_before_anything_starts(finished, tmp_path, capfd):
    root = copied(finished(), tmp_path / "runs")
    lose(root, (3, Stage.TRAIN))
    assert execute(["run", RUN, f"--root={root.url}", "--iterations=9"]) == 2
    said = capfd.readouterr().err
    assert "train.r0.json is lost: run 'small' has stages that were made from train of iteration 3" in said
    assert "starting Ray" not in said


def test_the_repair_of_a_fork_has_its_settings(finished, tmp_path, capfd):
    root = copied(finished(), tmp_path / "runs")
    lose(root, (3, Stage.TRAIN))
    more = "--set=rollout.ahead=1"
    assert execute(["fork", f"{RUN}@4", "--run=new", more, f"--root={root.url}"]) == 2
    said = capfd.readouterr().err
    assert f"`ratchet fork {RUN}@2 --run={RUN}-fork {more} --root={root.url}`" in said
    assert repaired(root, tmp_path, said, "rollout.ahead=1") == 2


@pytest.mark.parametrize("stage", [Stage.PREPARE, Stage.TRAIN, left_to_ci(SYNC)])
def test_without_the_beginning_a_run_can_only_be_restored_or_begun_again(finished, tmp_path, capfd, stage):
    root = copied(finished(), tmp_path / "runs")
    before = need(root, RUN, 0, stage)
    data = root.read_bytes(before.key)
    lose(root, (0, stage))
    if stage != Stage.PREPARE:  # without it no command knows the model
        said = refused(root, tmp_path, capfd)
        assert "Restore it from a copy of the root, or begin a new run: none can be forked" in said
    root.put_if_absent(before.key, data)
    assert read_status(root, RUN).complete


@pytest.mark.parametrize(
    "lost",
    [
        [(LAST, Stage.EVALUATE)],
        left_to_ci([(LAST, Stage.EVALUATE), (LAST, SYNC)]),
        [(LAST, stage) for stage in LOOP[3:]],
        left_to_ci([(LAST, stage) for stage in LOOP[2:]]),
        [(LAST, stage) for stage in LOOP[1:]],
    ],
    ids=len,
)
def test_the_newest_stages_are_simply_done_again(finished, tmp_path, lost):
    root = copied(finished(), tmp_path / "runs")
    lose(root, *lost)
    assert not any("lost" in one for one in read_status(root, RUN).warnings)
    assert read_status(root, RUN).current == LAST
    done = drive(root, tmp_path)
    assert {place[:2] for place in done if not place[2]} == {*lost}
    assert states(root, RUN) == states(finished(), RUN)
    assert verify(root, RUN).sound


@pytest.mark.parametrize("lost", [left_to_ci((LAST, Stage.ROLLOUT)), (LAST, Stage.TRAIN)])
def test_the_newest_iteration_needs_what_comes_before_a_stage_that_is_there(finished, tmp_path, capfd, lost):
    root = copied(finished(), tmp_path / "runs")
    lose(root, lost)
    assert repaired(root, tmp_path, refused(root, tmp_path, capfd)) == LAST - 1


def test_of_two_holes_the_first_counts(finished, tmp_path, capfd):
    root = copied(finished(), tmp_path / "runs")
    lose(root, (4, Stage.TRAIN), (2, Stage.REWARD), (4, Stage.ROLLOUT))
    assert repaired(root, tmp_path, refused(root, tmp_path, capfd)) == 1


def test_an_evaluation_in_the_middle_is_not_needed(finished, tmp_path):
    root = copied(finished(), tmp_path / "runs")
    lose(root, (2, Stage.EVALUATE))
    assert read_status(root, RUN).complete
    assert drive(root, tmp_path, last=LAST + 1)[0] == (LAST + 1, Stage.ROLLOUT, False)


def test_the_repair_begins_with_a_state_that_was_stored(finished, tmp_path, capfd):
    root = copied(finished("storage.save_every=3"), tmp_path / "runs")
    lose(root, (5, Stage.REWARD))
    assert repaired(root, tmp_path, refused(root, tmp_path, capfd, "storage.save_every=3"), "storage.save_every=3") == 3


@pytest.mark.parametrize(("lost", "last"), [left_to_ci(2, 0), (5, 4)])
def test_the_repair_begins_with_a_state_that_is_kept(finished, tmp_path, capfd, lost, last):
    root = copied(finished("storage.keep_newest=2"), tmp_path / "runs")
    lose(root, (lost, Stage.REWARD))
    said = refused(root, tmp_path, capfd, "storage.keep_newest=2")
    assert repaired(root, tmp_path, said, "storage.keep_newest=2") == last


@pytest.mark.parametrize(("keep", "last"), [((), 2), left_to_ci(("storage.keep_newest=2",), 0)])
def test_the_repair_of_a_run_that_samples_ahead_has_the_weights_that_sample(finished, tmp_path, capfd, keep, last):
    settings = ("rollout.ahead=2", *keep)
    root = copied(finished(*settings), tmp_path / "runs")
    lose(root, (3, SYNC))
    said = refused(root, tmp_path, capfd, *settings)
    assert repaired(root, tmp_path, said, *settings) == last


@pytest.mark.parametrize("ahead", [left_to_ci(0), 2])
@pytest.mark.parametrize("stage", [Stage.ROLLOUT, left_to_ci(Stage.REWARD), Stage.TRAIN, left_to_ci(SYNC)])
def test_a_killed_run_has_no_hole(tmp_path, ahead, stage):
    root, last = open_root(str(tmp_path / "runs")), 3
    with pytest.raises(Killed):
        drive(root, tmp_path, f"rollout.ahead={ahead}", last=last, at=killing(stage, 2, Point.COMMITTED))
    assert not read_status(root, RUN).complete
    assert not any("lost" in one for one in read_status(root, RUN).warnings)
    drive(root, tmp_path / "next", f"rollout.ahead={ahead}", last=last)
    assert read_status(root, RUN).complete


def test_a_fork_is_looked_at_from_its_own_first_iteration(finished, tmp_path, capfd):
    root = copied(finished(), tmp_path / "runs")
    make_fork(root, RUN, 2, "child")
    drive(root, tmp_path / "child", run="child")
    for at in (3, 2):
        lose(root, (at, Stage.ROLLOUT), run="child")
        said = refused(root, tmp_path, capfd, run="child")
        assert f"child/manifests/00000{at}/rollout" in said
        assert f"`ratchet fork child@{at - 1} --run=child-fork " in said
    assert repaired(root, tmp_path, said, run="child") == 1
    lose(root, (3, Stage.TRAIN))
    make_fork(root, RUN, 2, "before")  # a fork from before a hole is none of its business


def test_of_a_run_with_reruns_the_head_counts(finished, tmp_path, capfd):
    root = copied(finished(), tmp_path / "runs")
    rerun(root, RUN, Wanted(3, Stage.ROLLOUT, "to see", "tests", new_seeds=True))
    drive(root, tmp_path)
    assert read_revisions(root, RUN).head == 1
    root.remove(layout.manifest_key(RUN, 4, Stage.REWARD, 0))  # of the first results
    assert read_status(root, RUN).complete
    lose(root, (4, Stage.REWARD))
    said = refused(root, tmp_path, capfd)
    assert "small/manifests/000004/reward.r1.json is lost" in said
    assert repaired(root, tmp_path, said) == 3


@pytest.mark.parametrize(
    "lost",
    [left_to_ci((0, Stage.SELECT)), (0, Stage.RESCORE), left_to_ci((0, Stage.PREPARE)), (1, Stage.TRAIN)],
)
def test_a_retraining_names_what_it_has_lost(finished, tmp_path, lost):
    root, run = copied(finished(), tmp_path / "runs"), "again"
    config = retrain_config(root, run, {"start": f"{RUN}@2", "select": [RUN], "samples": 8, "rescore": True})
    begin_retraining(root, run, config)
    driver(root, config, tmp_path / "again", run=run).drive()
    assert read_status(root, run).complete
    lose(root, lost, run=run)
    status = read_status(root, run)
    assert not status.complete
    assert layout.manifest_key(run, *lost, 0) in status.warnings[0]
    assert "begin a new run" in status.warnings[0]
    with pytest.raises(WrongRecord, match=f"made from {lost[1]} of iteration {lost[0]}"):
        driver(root, config, tmp_path / "again", run=run).drive()


def test_a_retraining_without_new_scores_needs_none(finished, tmp_path):
    root, run = copied(finished(), tmp_path / "runs"), "again"
    config = retrain_config(root, run, {"start": f"{RUN}@2", "select": [RUN], "samples": 8})
    begin_retraining(root, run, config)
    assert not read_status(root, run).complete
    driver(root, config, tmp_path / "again", run=run).drive()
    assert read_status(root, run).complete
