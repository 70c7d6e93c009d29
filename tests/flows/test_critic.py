"""A critic in the loop over small workers: part of each train state, killed where the policy is, made again with it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flows.driving import ask_again
from storage.backends.root import Root, open_root
from storage.errors import DigestMismatch, InputError
from storage.kill_points import Point
from storage.manifest import need
from storage.revisions import read_revisions
from storage.upkeep.redoing import Wanted
from storage.upkeep.verify import verify
from tasks.checks import check_config, prepared_stage
from tasks.config.stored import check_fixed, forked_config
from tasks.forking import begin_retraining, retrain_config
from tasks.stages.names import Stage
from tasks.stages.views import Trained
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.here import WorkersHere
from tests.small.models import made
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


SOURCE = "train.critic.source"


CRITICS, MODEL = (f"{SOURCE}=somewhere",), ("train.policy.loss.type=reward_model", "train.policy.kl_coefficient=0")
TEACHER = ('train.policy.distill.teacher="t"', "train.policy.distill.reward_weight=1")
JUDGE = ('engines.judge.source="j"', "reward.function=reward_model")
RATE = "train.critic.learning_rate=1e-3"


@pytest.mark.parametrize(
    ("run", "settings", "said"),
    [
        (RUN, CRITICS, "begins with the policy .* and a stage that is done again goes on with it: leave out"),
        (RUN, TEACHER, "has stored no teacher, so a stage that is done again cannot have one"),
        (RUN, JUDGE, "engines cannot change when train of iteration 1 is done again"),
        (RUN, ("train.precision=bf16",), "train.precision cannot change when train of iteration 1 is done again"),
        ("plain", CRITIC, r"states of run 'plain' hold none \(train.critic\), so a stage that is done again cannot"),
        ("plain", ("train.lora.rank=4",), "train.lora cannot change when train of iteration 1 is done again"),
        ("plain", (*MODEL, RATE, *CRITICS), f"{SOURCE} is .* run 'plain' has stored no model for a critic: leave it"),
    ],
)
def test_a_stage_that_is_done_again_cannot_need_what_the_run_has_not_stored(both: Root, run, settings, said):
    with pytest.raises(InputError, match=said):
        ask_again(both, run, Wanted(1, Stage.TRAIN, "to see", "tests"), settings)
    assert not read_revisions(both, run).reruns  # a rerun that cannot be done would fail at every start


@pytest.fixture(scope="module")
def both(whole: Root, tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A root with the run that has a critic, and one that has none."""
    drive(whole, tmp_path_factory.mktemp("plain"), run="plain")
    return whole


def from_folder(folder: Path) -> tuple[str, ...]:
    return (*CRITIC, f'{SOURCE}="{folder}"')


def classifier(folder: Path, labels: int = 1, constants: int = 0, **sizes: int) -> Path:
    """Folder of a sequence classifier."""
    made(folder, 7, **sizes)
    facts, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    told = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": dict.fromkeys(map(str, range(labels)), "")}
    (folder / "config.json").write_text(json.dumps({**facts, **told}))
    weights["score.weight"] = weights.pop("lm_head.weight")[:labels]
    if constants:
        weights["score.bias"] = np.ones(constants, np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_critic_begins_with_a_folder_that_the_run_keeps(whole: Root, tmp_path: Path):
    folder, found = classifier(tmp_path / "critic"), list[list[Trained]]()
    for name, points in (("whole", ()), ("killed", ((0, Point.UPLOAD), (1, Point.UPLOAD)))):
        root = open_root(str(tmp_path / name))
        for iteration, point in points:
            with pytest.raises(Killed):
                drive(root, tmp_path / point, *from_folder(folder), at=killing(Stage.TRAIN, iteration, point))
            shutil.rmtree(folder, ignore_errors=True)  # the run has its own copy
        drive(root, tmp_path / f"{name}-again", *from_folder(folder))
        found.append(states(root))
    assert [one.digest for one in found[0]] == [one.digest for one in found[1]]
    own, policys = found[0][0].identity, states(whole)[0].identity
    assert (own.tensors, own.critic != policys.critic) == (policys.tensors, True)
    names = need(root, RUN, 0, Stage.PREPARE).part_names
    assert {"critic/config.json", "critic/model.safetensors", "critic/tokenizer.json"} <= set(names)
    refuse_others(root, made(tmp_path / "critic", 8))


def refuse_others(root: Root, changed: Path) -> None:
    """Refusals of a run whose critic began with a folder."""
    refused(root, from_folder(changed), f"{SOURCE} .*critic is not the model that run 'small' was started with")
    with pytest.raises(InputError, match=r"begins with a model of its own .*: give train.critic.source, or start"):
        check_fixed(small_config(from_folder(changed)), small_config(CRITIC), RUN, "a fork of it")


def refused(root: Root, settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_config(small_config([f"run.iterations={LAST}", *settings]), root, prepared_stage(root, RUN))


def test_a_model_with_which_no_critic_can_begin_is_refused(whole: Root, tmp_path: Path):
    one, none = classifier(tmp_path / "one"), open_root(str(tmp_path / "runs"))
    check_config(small_config(from_folder(one)), none)
    check_config(small_config(from_folder(classifier(tmp_path / "stored", constants=1))), none)
    refused(
        none, from_folder(classifier(tmp_path / "two", constants=2)), r"score.bias has the shape \[2\]: .* --critic"
    )
    refused(none, from_folder(classifier(tmp_path / "three", 3)), "3 classes apart .* a value is one number: choose")
    refused(none, from_folder(tmp_path / "nothing"), f"{SOURCE} {tmp_path / 'nothing'} does not exist")
    refused(none, from_folder(classifier(tmp_path / "short", max_positions=64)), "context of 64 tokens, but .* critic")
    refused(none, (*from_folder(one), "train.parallel.tensor=4", "train.parallel.pipeline=1"), "cannot be divided by")
    path = shutil.copytree(one, tmp_path / "other") / "tokenizer.json"
    path.write_text(path.read_text().replace('"7"', '"seven"'))
    refused(none, from_folder(path.parent), r"token \d+ is '7' for the model, and 'seven' for the critic")
    refused(whole, from_folder(one), f"{SOURCE} is .*, but run 'small' has stored no model for a critic: leave it out")
    with pytest.raises(InputError, match=r"begins with the policy .*: leave out train.critic.source, or start"):
        forked_config(whole, RUN, "child", from_folder(one))
