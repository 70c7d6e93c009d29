"""A critic in the loop over small workers: part of each train state, killed where the policy is, made again with it."""

from pathlib import Path

import pytest

from storage.backends.root import Root, open_root
from storage.errors import DigestMismatch, InputError
from storage.kill_points import Point
from storage.manifest import need
from storage.upkeep.verify import verify
from tasks.config.stored import check_fixed, forked_config
from tasks.retraining import begin_retraining, retrain_config
from tasks.stages.names import Stage
from tasks.stages.views import Trained
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.here import WorkersHere
from tests.small.workers import SmallTrainer

CRITIC = ("train.policy.advantage.type=gae", "train.critic.learning_rate=1e-3")
LAST = 3


def drive(root: Root, scratch: Path, *settings: str, run: str = RUN, **more) -> None:
    config = small_config([f"run.iterations={LAST}", *settings])
    workers = WorkersHere(config, trainer=more.pop("trainer", SmallTrainer))
    driver(root, config, scratch, run=run, workers=workers, **more).drive()


def states(root: Root) -> list[Trained]:
    return [Trained(need(root, RUN, number, Stage.TRAIN)) for number in range(LAST + 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Root:
    folder = tmp_path_factory.mktemp("whole")
    root = open_root(str(folder / "runs"))
    drive(root, folder / "scratch", *CRITIC)
    return root


@pytest.mark.parametrize(
    ("iteration", "point"),
    [
        (1, Point.UPLOAD),
        *(
            pytest.param(iteration, point, marks=pytest.mark.slow)
            for iteration in (0, 1)
            for point in (Point.STARTED, Point.MID_PART, Point.UPLOAD, Point.PARTS_DONE, Point.COMMITTED)
            if (iteration, point) != (1, Point.UPLOAD)
        ),
    ],
)
@pytest.mark.parametrize("settings", [(), pytest.param(("storage.save_every=2",), marks=pytest.mark.slow)], ids=str)
def test_a_killed_run_ends_in_the_same_bits(whole: Root, tmp_path: Path, iteration: int, point: Point, settings):
    root = open_root(str(tmp_path / "runs"))
    at = killing(Stage.TRAIN, iteration if not settings else 2 * iteration, point)
    with pytest.raises(Killed):
        drive(root, tmp_path / "first", *CRITIC, *settings, at=at)
    drive(root, tmp_path / "second", *CRITIC, *settings)
    assert [one.digest for one in states(root)] == [one.digest for one in states(whole)]
    assert verify(root, RUN).sound


def test_each_state_holds_the_critic_under_an_identity_of_its_own(whole: Root):
    assert len({one.identity.critic for one in states(whole)} - {None}) == LAST + 1
    for one in states(whole):
        names = {name for name in one.manifest.part_names if name.startswith("state/critic/")}
        assert names == {f"state/critic/{name}" for name in ("weights-0.bin", "weights-1.bin", "trainer.json")}


class Forgetful(SmallTrainer):
    """Does not load its critic."""

    def load(self, directory):
        held = super().load(directory)
        self._critic.begin(self.arrays["weights"])
        return type(held)(**{**vars(held), "identity": self._identified()})


def test_a_critic_that_was_not_loaded_is_noticed(tmp_path: Path):
    root = open_root(str(tmp_path / "runs"))
    with pytest.raises(Killed):
        drive(root, tmp_path / "first", *CRITIC, at=killing(Stage.WEIGHT_SYNC, 1, Point.STARTED))
    with pytest.raises(DigestMismatch, match="critic differ after it was loaded"):
        drive(root, tmp_path / "second", *CRITIC, trainer=Forgetful)


def test_a_fork_keeps_its_critic_with_other_settings(whole: Root, tmp_path: Path):
    drive(whole, tmp_path / "scratch", run="without")
    none = r"of run 'without' hold none \(train.critic\), so a fork of it cannot have one: start a new run"
    with pytest.raises(InputError, match=none):
        forked_config(whole, "without", "child", CRITIC)
    with pytest.raises(InputError, match=r"hold a critic \(train.critic\), so what begins with it cannot have none"):
        check_fixed(small_config(CRITIC), small_config(), RUN, "what begins with it")
    critic = forked_config(whole, RUN, "child", ["train.critic.learning_rate=1e-4"]).train.critic
    assert critic is not None and critic.learning_rate == 1e-4


@pytest.mark.slow
def test_stored_samples_train_a_critic_too(whole: Root, tmp_path: Path):
    config = retrain_config(whole, "again", {"start": f"{RUN}@1", "select": [RUN], "samples": 8}, None, [])
    begin_retraining(whole, "again", config)
    driver(whole, config, tmp_path / "scratch", run="again").drive()
    before, after = (Trained(need(whole, "again", number, Stage.TRAIN)).identity.critic for number in (0, 1))
    assert before == states(whole)[1].identity.critic
    assert after not in (None, before)
