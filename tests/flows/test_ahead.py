"""Rollouts beside a training: the setting is part of the run's meaning; reruns and forks keep the order of draws."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.driving import rerun
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import need
from storage.ownership.lease import hold
from storage.upkeep.redoing import Wanted, choose
from storage.upkeep.verify import verify
from tasks.config.stored import check_record
from tasks.forking import make_fork
from tasks.stages.names import WORKFLOW, Stage
from tests.small.config import PROMPTS, small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.stored import copied, driven_once


@pytest.fixture
def root(tmp_path) -> Root:
    return open_root(str(tmp_path / "runs"))


def drive(root: Root, tmp_path: Path, *settings: str, run: str = RUN, **more):
    process = driver(root, small_config(["run.iterations=3", *settings]), tmp_path / "scratch", run=run, **more)
    process.drive()
    return process.done


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Callable[..., Root]:
    """A run with these settings, driven once; only copies of it are changed."""
    return driven_once(tmp_path_factory, drive)


def rollouts(root: Root, run: str = RUN):
    return [need(root, run, iteration, Stage.ROLLOUT) for iteration in (1, 2, 3)]


def versions(root: Root, run: str = RUN) -> list[object]:
    return [one.facts["weight_version"] for one in rollouts(root, run)]


@pytest.mark.parametrize(("ahead", "expected"), [(0, [0, 1, 2]), (1, [0, 0, 1]), (2, [0, 0, 0])])
def test_a_rollout_is_sampled_by_weights_as_many_updates_older(root, tmp_path, ahead, expected):
    done = drive(root, tmp_path, f"rollout.ahead={ahead}")
    assert versions(root) == expected
    assert [one.facts["cursor"] for one in rollouts(root)] == [PROMPTS, 2 * PROMPTS, 3 * PROMPTS]
    assert len(done) == len(set(done)) == 19
    assert not any(reused for *_, reused in done)


WAITS = """
import time
from pathlib import Path

def score(record, response):
    while Path({hold!r}).exists() and not Path({go!r}).exists():
        time.sleep(0.01)
    return 1.0
"""


def test_rewards_beside_a_training_do_not_wait_for_the_storing_of_its_state(root, tmp_path):
    hold, go, ended = tmp_path / "hold", tmp_path / "go", []
    (tmp_path / "waits.py").write_text(WAITS.format(hold=str(hold), go=str(go)))

    def at(_context, point, key):
        place = layout.place_of(key)
        if (point, place) == (Point.STARTED, (3, Stage.ROLLOUT)):
            hold.touch()
        elif (point, place) == (Point.UPLOAD, (2, Stage.TRAIN)):  # the outbox stores the state of iteration 2
            go.touch()
            ended.append(within(120, lambda: (3, Stage.REWARD, False) in process.done))

    settings = ["run.iterations=3", "rollout.ahead=1", f"reward.function={tmp_path / 'waits.py'}:score"]
    process = driver(root, small_config(settings), tmp_path / "scratch", at=at)
    process.drive()
    assert ended == [True]


def within(seconds: float, true) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.01)
    return true()


@pytest.mark.parametrize(("first", "then"), [(0, 1), (1, 0), (1, 2)])
def test_the_setting_changes_between_a_kill_and_the_next_start_only_before_the_first_rollout_begins(
    root, tmp_path, finished, first, then
):
    before, after = f"rollout.ahead={first}", f"rollout.ahead={then}"
    with pytest.raises(Killed):
        drive(root, tmp_path, before, at=killing(Stage.WEIGHT_SYNC, 0, Point.STARTED))
    check_record(root, RUN, small_config(["run.iterations=3", after]))
    with pytest.raises(Killed):
        drive(root, tmp_path, after, at=killing(Stage.REWARD, 1, Point.STARTED))
    with pytest.raises(InputError, match=f"rollout.ahead: the run was started with {then}, but is now given {first}"):
        check_record(root, RUN, small_config(["run.iterations=3", before]))
    drive(root, tmp_path, after)
    assert [[part.digest for part in one.parts] for one in rollouts(root)] == [
        [part.digest for part in one.parts] for one in rollouts(finished(after))
    ]


@pytest.mark.parametrize(("ahead", "expected"), [(0, [0, 0, 2]), (1, [0, 0, 1]), (2, [0, 0, 0])])
def test_a_fork_goes_on_with_another_number_of_rollouts_ahead(finished, tmp_path, ahead, expected):
    root = copied(finished("rollout.ahead=1"), tmp_path / "runs")
    setting = f"rollout.ahead={ahead}"
    make_fork(root, RUN, 2, "fork", [setting])
    drive(root, tmp_path, setting, run="fork")
    assert versions(root, "fork") == expected
    assert verify(root, "fork").sound


@pytest.mark.parametrize("stage", [Stage.ROLLOUT, Stage.TRAIN])
def test_what_is_done_again_ends_as_it_was(finished, tmp_path, stage):
    root = copied(finished("rollout.ahead=1"), tmp_path / "runs")
    before = [one.digest for one in rollouts(root)]
    rerun(root, RUN, Wanted(2, stage, "to see", "tests"))
    drive(root, tmp_path, "rollout.ahead=1")
    assert [one.digest for one in rollouts(root)] == before
    assert verify(root, RUN).sound


@pytest.mark.parametrize(("stage", "iteration"), [(Stage.ROLLOUT, 3), (Stage.TRAIN, 2)])
def test_what_needs_a_state_that_is_not_kept_is_not_begun_again(finished, stage, iteration):
    root = finished("rollout.ahead=1", "storage.keep_newest=1")
    with pytest.raises(InputError, match="needs the train state of iteration 1 of run 'small', which retention has"):
        rerun(root, RUN, Wanted(iteration, stage, "to see", "tests", ahead=1))


def test_a_head_whose_next_rollouts_need_a_state_that_is_not_kept_is_not_chosen(root, tmp_path):
    drive(root, tmp_path, "storage.keep_newest=1")
    with hold(root, RUN, "tests") as lease:
        with pytest.raises(
            InputError, match="needs the train state of iteration 2 of run 'small', which retention has"
        ):
            choose(root, WORKFLOW, RUN, 0, "to see", "tests", lease, ahead=1)
        choose(root, WORKFLOW, RUN, 0, "in turns only the newest is needed", "tests", lease)


def test_a_fork_whose_rollouts_need_a_state_that_is_not_kept_is_not_begun(finished):
    root = finished("rollout.ahead=1", "storage.keep_newest=1")
    with pytest.raises(InputError, match="the train state of iteration 1 of run 'small' is not kept"):
        make_fork(root, RUN, 3, "fork", ["rollout.ahead=2"])
