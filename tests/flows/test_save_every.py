"""States that are not stored are made again, equal to what their manifests record, or refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flows.driving import rerun
from storage.backends.root import Root, open_root
from storage.errors import DigestMismatch, InputError
from storage.kill_points import Point
from storage.layout import part_folder
from storage.manifest import need
from storage.ownership.lease import hold
from storage.revisions import read_revisions
from storage.upkeep import redoing
from storage.upkeep.redoing import Wanted
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import verify
from tasks.checks import check_saving
from tasks.export.order import choose
from tasks.forking import make_fork
from tasks.stages.names import WORKFLOW, Stage
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.here import WorkersHere
from tests.small.stored import copied, driven_once
from tests.small.workers import SmallTrainer

LAST = 7
THIRD = "storage.save_every=3"


@pytest.fixture
def root(tmp_path) -> Root:
    return open_root(str(tmp_path / "runs"))


def drive(root: Root, tmp_path: Path, *settings: str, run: str = RUN, **more):
    config = small_config([f"run.iterations={LAST}", *settings])
    driver(root, config, tmp_path / "scratch", run=run, **more).drive()


def digests(root: Root, last: int = LAST) -> list[str]:
    return [need(root, RUN, at, Stage.TRAIN).digest for at in range(last + 1)]


def stored(root: Root, last: int = LAST) -> list[int]:
    there = set(root.keys(part_folder(RUN)))
    return [at for at in range(last + 1) if there & set(need(root, RUN, at, Stage.TRAIN).state_keys)]


def tables(root: Root, run: str = RUN) -> list[int]:
    """Iterations whose table of the trainer is there."""
    there = set(root.keys(part_folder(run)))
    named = {at: need(root, run, at, Stage.TRAIN).lasted().parts for at in range(LAST + 1)}
    return [at for at, parts in named.items() if parts and there >= {part.key for part in parts}]


@pytest.fixture(scope="module")
def each(tmp_path_factory) -> Callable[..., Root]:
    """A run with these settings that stores each state, driven once."""
    return driven_once(tmp_path_factory, drive)


@pytest.fixture
def expected(each) -> list[str]:
    return digests(each("rollout.ahead=0"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Root:
    """A run that stores a third of its states; only copies of it are changed."""
    folder = tmp_path_factory.mktemp("third")
    root = open_root(str(folder / "runs"))
    drive(root, folder, THIRD)
    return root


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Root:
    """The same, killed before the training of iteration 6, whose predecessor is not stored."""
    folder = tmp_path_factory.mktemp("begun")
    root = open_root(str(folder / "runs"))
    with pytest.raises(Killed):
        drive(root, folder, THIRD, at=killing(Stage.TRAIN, 6, Point.STARTED))
    return root


def test_a_third_of_the_states_and_the_last_are_stored(whole, expected):
    assert stored(whole) == [0, 3, 6, 7]
    assert digests(whole) == expected
    assert verify(whole, RUN).sound


@pytest.mark.parametrize(
    ("stage", "iteration", "ahead"),
    [
        (Stage.WEIGHT_SYNC, 4, 0),
        pytest.param(Stage.ROLLOUT, 6, 1, marks=pytest.mark.slow),
        pytest.param(Stage.WEIGHT_SYNC, 4, 1, marks=pytest.mark.slow),
        pytest.param(Stage.ROLLOUT, 6, 0, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_makes_the_states_again(root, tmp_path, each, stage, iteration, ahead):
    settings = (THIRD, f"rollout.ahead={ahead}")
    with pytest.raises(Killed):
        drive(root, tmp_path, *settings, at=killing(stage, iteration, Point.STARTED))
    drive(root, tmp_path, *settings)
    assert digests(root) == digests(each(f"rollout.ahead={ahead}"))
    assert verify(root, RUN).sound


@pytest.mark.parametrize("then", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_setting_may_change_between_a_kill_and_the_next_start(begun, tmp_path, expected, then):
    root = copied(begun, tmp_path / "runs")
    drive(root, tmp_path, f"storage.save_every={then}")
    assert digests(root) == expected
    assert verify(root, RUN).sound


def test_retention_keeps_what_a_state_is_made_again_from(root, tmp_path, expected):
    settings = (THIRD, "storage.keep_newest=2")
    with pytest.raises(Killed):
        drive(root, tmp_path, *settings, at=killing(Stage.TRAIN, 6, Point.STARTED))
    assert stored(root, 5) == [0, 3]
    assert not collect(root, WORKFLOW, RUN, Retention(newest=2)).garbage
    drive(root, tmp_path, *settings)
    assert stored(root) == [0, 6, 7]
    assert tables(root) == [3, 6, 7]  # what is beside a state is kept
    make_fork(root, RUN, 7, "fork")
    assert tables(root, "fork") == [3, 6, 7]
    assert verify(root, "fork").sound
    assert digests(root) == expected
    drive(root, tmp_path, *settings, "run.iterations=9")
    assert stored(root, 9) == [0, 7, 9]


class Unrepeatable(SmallTrainer):
    """A rank whose sums depend on something else."""

    def train_policy(self, *given, **named):
        report = super().train_policy(*given, **named)
        self.arrays["weights"][0] = np.nextafter(self.arrays["weights"][0], np.float32(1))
        return report


def test_a_state_that_comes_out_otherwise_is_refused(begun, tmp_path):
    root = copied(begun, tmp_path / "runs")
    with pytest.raises(DigestMismatch, match=r"tensors differ.*`ratchet rerun small@4:train --reason TEXT`"):
        workers = WorkersHere(small_config([f"run.iterations={LAST}", THIRD]), trainer=Unrepeatable)
        drive(root, tmp_path, THIRD, workers=workers)


def test_another_stage_again_from_a_state_that_is_not_stored(whole, tmp_path, expected):
    root = copied(whole, tmp_path / "runs")
    rerun(root, RUN, Wanted(6, Stage.TRAIN, "to see", "tests"))
    drive(root, tmp_path, THIRD)
    assert digests(root) == expected
    with pytest.raises(InputError, match=r"iteration 4 of run 'small' is not stored .*those of \[0, 3, 6, 7\] are"):
        rerun(root, RUN, Wanted(5, Stage.TRAIN, "to see", "tests", settings={"train": {"micro_batch_size": 1}}))


def test_other_settings_need_stored_states_for_the_weights_that_sample_too(root, tmp_path):
    older = (THIRD, "rollout.ahead=1")
    drive(root, tmp_path, *older)
    colder = Wanted(4, Stage.ROLLOUT, "to see", "tests", settings={"rollout.temperature": 0.5}, ahead=1)
    with pytest.raises(InputError, match=r"iteration 2 .* is not stored .*Do rollout of iteration 1 again"):
        rerun(root, RUN, colder)
    rerun(root, RUN, replace(colder, iteration=1))
    drive(root, tmp_path, *older)
    assert verify(root, RUN).sound


def test_a_head_is_not_chosen_whose_settings_cannot_make_the_weights_that_sample(root, tmp_path):
    older, other = (THIRD, "rollout.ahead=2"), {"train.policy.mini_batches": 2}
    drive(root, tmp_path, *older)
    rerun(root, RUN, Wanted(4, Stage.TRAIN, "to see", "tests", cascade=False, settings=other, ahead=2))
    driver(root, small_config([f"run.iterations={LAST}", *older]), tmp_path / "scratch").redo()
    with pytest.raises(InputError, match=r"iteration 2 .* is not stored"), hold(root, RUN, "tests") as lease:
        redoing.choose(root, WORKFLOW, RUN, 1, "it is better", "tests", lease, 2)
    assert read_revisions(root, RUN).head == 0


def test_states_made_under_other_settings_are_not_made_again_under_those_of_the_head(whole, tmp_path):
    root = copied(whole, tmp_path / "runs")
    fewer = Wanted(4, Stage.ROLLOUT, "to see", "tests", settings={"rollout.top_k": 3})
    rerun(root, RUN, replace(fewer, iteration=6))  # no state depends on it, given its samples
    drive(root, tmp_path, THIRD)
    rerun(root, RUN, replace(fewer, settings={"rollout.temperature": 0.5}))
    drive(root, tmp_path, THIRD, "rollout.top_k=3")
    with pytest.raises(InputError, match=r"iteration 2 of run 'small' is not stored .*Do train of iteration 1 again"):
        rerun(root, RUN, Wanted(3, Stage.TRAIN, "under those of the head", "tests"))
    assert read_revisions(root, RUN).head == 2


def test_states_of_another_revision_are_made_again_from_its_samples(whole, each, tmp_path):
    root, other = copied(whole, tmp_path / "runs"), copied(each("rollout.ahead=0"), tmp_path / "other")
    for one in (root, other):
        rerun(one, RUN, Wanted(4, Stage.ROLLOUT, "other samples", "tests", new_seeds=True))
    with pytest.raises(Killed):
        drive(root, tmp_path, THIRD, at=killing(Stage.TRAIN, 6, Point.STARTED))
    drive(root, tmp_path, THIRD)
    drive(other, tmp_path)
    assert digests(root) == digests(other)


def test_a_fork_and_an_export_need_a_state_that_is_stored(whole, tmp_path):
    root = copied(whole, tmp_path / "runs")
    with pytest.raises(InputError, match=r"iteration 4 of run 'small' is not kept; those of \[0, 3, 6, 7\] are"):
        make_fork(root, RUN, 4, "fork")
    make_fork(root, RUN, 3, "fork")
    for wanted in (3, 6):
        with pytest.raises(InputError, match=r"sample for it \(rollout\.ahead\): choose one of \[0, 7\]"):
            make_fork(root, RUN, wanted, "ahead", ["rollout.ahead=1"])
    make_fork(root, RUN, 7, "ahead", ["rollout.ahead=1"])
    with pytest.raises(InputError, match=r"of \[0, 3, 6, 7\] are"):
        choose(root, f"{RUN}@4")


@pytest.mark.parametrize(
    ("settings", "device", "fact"),
    [
        (["storage.save_every=2"], "cuda", "set device.deterministic = 'trainer'"),
        (["storage.save_every=2", "train.policy.distill.teacher=t"], "cpu", "train.policy.distill"),
    ],
)
def test_states_that_could_not_be_made_again_are_refused_before_the_start(settings, device, fact):
    with pytest.raises(InputError, match=fact):
        check_saving(small_config(settings), device)


def test_states_to_be_kept_are_stored():
    with pytest.raises(InputError, match=r"keep_every = 3 keeps states that storage\.save_every = 2 does not store"):
        small_config(["storage.save_every=2", "storage.keep_newest=1", "storage.keep_every=3"])
