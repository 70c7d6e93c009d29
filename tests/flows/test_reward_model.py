"""A reward model in the loop over small workers: from the states of a run without a critic, killed, and refused."""

from pathlib import Path

import pytest

from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import need
from storage.upkeep.verify import verify
from tasks.forking import begin_retraining, retrain_config
from tasks.stages.names import Stage
from tasks.stages.views import Trained
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, killing
from trainer_core.state.facts import StateIdentity

SETTINGS = (
    "train.policy.loss={type='reward_model',pairs='all'}",
    "train.policy.kl_coefficient=0",
    "train.critic.learning_rate=1e-3",
)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Root:
    folder = tmp_path_factory.mktemp("sampled")
    root = open_root(str(folder / "runs"))
    driver(root, small_config(["rollout.samples=3"]), folder / "scratch").drive()
    return root


def train(root: Root, scratch: Path, run: str, at=None, **given) -> list[StateIdentity]:
    config = retrain_config(root, run, {"start": f"{RUN}@1", "select": [RUN], "samples": 9, **given}, None, SETTINGS)
    begin_retraining(root, run, config)
    driver(root, config, scratch, run=run, at=at).drive()
    assert verify(root, run).sound
    return [Trained(need(root, run, number, Stage.TRAIN)).identity for number in range(3)]


def test_a_killed_reward_model_ends_in_the_same_bits(sampled: Root, tmp_path: Path):
    whole = train(sampled, tmp_path / "whole", "whole")
    with pytest.raises(Killed):
        train(sampled, tmp_path / "first", "killed", killing(Stage.TRAIN, 2, Point.UPLOAD))
    assert train(sampled, tmp_path / "second", "killed") == whole
    assert whole[0].critic is None  # that of the run it begins from
    assert len({one.critic for one in whole}) == 3


def test_samples_of_which_no_two_can_be_compared_are_refused(sampled: Root, tmp_path: Path):
    for where in ("sample_id = 0", "reward > 1000000"):
        with pytest.raises(InputError, match=r"two samples of a prompt with different scores|nothing is selected"):
            train(sampled, tmp_path, "refused", where=where)
        assert not sampled.exists("refused/run.json")
    with pytest.raises(InputError, match=r"no prompt of the selection has two: change retrain\.where"):
        train(sampled, tmp_path, "refused", where="sample_id = 0")
