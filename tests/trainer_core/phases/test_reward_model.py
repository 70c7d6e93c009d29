"""Reward models against transformers in float64: losses, gradients, updates, scores; from a state without a critic."""

import numpy as np
import pytest

from storage.errors import InputError
from tests.trainer_core.models import random_samples
from tests.trainer_core.phases.test_critic import LAYOUTS, RATE, Plain
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, PolicyConfig, TrainerConfig
from trainer_core.optimizer_config import CriticConfig
from trainer_core.state.facts import check_critic

ITERATIONS = [random_samples(seed, turns=True) for seed in (3, 4)]
NAMES = ("loss", "grad_norm", "preference_accuracy", "preference_margin")
SMOOTHING = 0.1
PARAMETERS = [pytest.param(name, marks=() if name == "single" else pytest.mark.full) for name in LAYOUTS]


def settings(layout="single"):
    loss = {"type": "reward_model", "pairs": "all", "label_smoothing": SMOOTHING}
    return TrainerConfig(
        parallel=LAYOUTS[layout], optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64, micro_batch_size=4,
        policy=PolicyConfig.model_validate({"loss": loss}), critic=CriticConfig(learning_rate=RATE, eps=1e-2, epochs=3),
    )  # fmt: skip


class PlainRewards(Plain):
    """A reward model of transformers' layers in float64."""

    def scores(self, samples):
        """Reward of each sample, read behind its last token."""
        import torch

        starts = np.cumsum(samples.lengths) - samples.lengths
        for row in range(len(samples)):
            tokens = samples.tokens[starts[row] : starts[row] + samples.lengths[row]].astype(np.int64)
            yield self.head(self.trunk(torch.from_numpy(tokens)[None]).last_hidden_state[0, -1])[0]

    def iteration(self, samples):
        """Figures of the three updates of an iteration."""
        import torch

        better, worse = np.array(
            [
                (one, other)
                for one in range(len(samples))
                for other in range(len(samples))
                if samples.groups[one] == samples.groups[other] and samples.usable[one] and samples.usable[other]
                if samples.rewards[one] > samples.rewards[other]
            ]
        ).T
        found = []
        for _ in range(3):
            rewards = torch.stack(list(self.scores(samples)))
            margins = rewards[better] - rewards[worse]
            right, wrong = (torch.nn.functional.logsigmoid(sign * margins) for sign in (1, -1))
            loss = -((1 - SMOOTHING) * right + SMOOTHING * wrong).mean()
            own = ((margins > 0).double().mean().item(), margins.mean().item())
            found.append((loss.item(), self.step(loss), *own))
        means = np.mean(found, axis=0)
        return dict(zip(NAMES, (*means[:2], *found[0][2:]), strict=True)), len(better)


def in_double(rank, world_size, store, directory):
    """Figures of two iterations, and the rewards of the first one's samples after them."""
    import torch

    plain = PlainRewards(directory)
    figures = [plain.iteration(samples) for samples in ITERATIONS]
    with torch.no_grad():
        return figures, torch.stack(list(plain.scores(ITERATIONS[0]))).numpy()


@pytest.fixture(scope="module")
def expected(model_dir):
    return run_ranks(1, in_double, model_dir)[0]


def learn(trainer, folder, policy):
    """From a state without a critic two iterations, between which the state is saved and loaded; rewards after them."""
    if policy is None:
        trainer.import_model()
        policy = folder / "policy"
        for name in (saved := trainer.save(policy)).names:
            if name.startswith("critic/"):
                (policy / name).unlink()
        assert saved.identity.critic is not None
        trainer.train_policy(ITERATIONS[1], 1.0)  # of which nothing is left in a model that begins with the state
    begun = trainer.load(policy)
    assert begun.identity.critic is None
    first = trainer.train_policy(ITERATIONS[0], 1.0)
    saved = trainer.save(folder / "state").identity
    assert saved.tensors == begun.identity.tensors
    assert trainer.load(folder / "state").identity == saved
    second = trainer.train_policy(ITERATIONS[1], 1.0)
    assert trainer.state_identity().tensors == saved.tensors  # the policy stays as it is
    assert trainer.state_identity().critic not in (saved.critic, None)
    return first, second, trainer._critic.scores(ITERATIONS[0], np.arange(len(ITERATIONS[0])))


@pytest.fixture(scope="module")
def alone(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_trainers(model_dir, settings(), learn, folder, None)


@pytest.mark.parametrize("layout", PARAMETERS)
def test_updates_and_rewards_are_those_of_float64(model_dir, expected, alone, tmp_path, layout):
    figures, rewards = expected
    folder, own = alone
    found = own if layout == "single" else run_trainers(model_dir, settings(layout), learn, tmp_path, folder / "policy")
    for first, second, scores in found:
        for report, (wanted, pairs) in zip((first, second), figures, strict=True):
            assert {name: report[name] for name in NAMES} == pytest.approx(wanted, rel=1e-5, abs=1e-5)
            assert (report["pairs"], report["critic_steps"], report["steps"]) == (pairs, 3, 0)
        np.testing.assert_allclose(scores, rewards, rtol=0, atol=1e-5)
    assert figures[1][0]["preference_margin"] != 0


def test_another_objective_does_not_begin_a_critic(alone):
    folder, _ = alone
    with pytest.raises(InputError, match=r"holds no critic, but the trainer has a critic"):
        check_critic(folder / "policy", True)
    with pytest.raises(InputError, match=r"holds a critic, but the trainer has no critic"):
        check_critic(folder / "state", False, begins=True)
