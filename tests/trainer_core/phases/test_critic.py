"""PPO's critic against float64 of its own kind: values, updates, what the policy gets, its state on other layouts."""

import math
import shutil

import numpy as np
import pytest

from storage.errors import InputError
from tests.trainer_core.models import make_family, places_of, random_samples
from tests.trainer_core.objectives.test_advantages import gae_by_loops
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import MemoryConfig, OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig
from trainer_core.optimizer_config import CriticConfig
from trainer_core.state.comparison import compare_states
from trainer_core.state.facts import CRITIC, check_critic

ITERATIONS = [random_samples(seed, turns=True) for seed in (3, 4)]
GAMMA, LAMBDA, CLIP, RATE = 0.97, 0.8, 0.05, 5e-3
ADVANTAGE = {"type": "gae", "gamma": GAMMA, "gae_lambda": LAMBDA}
EVERYTHING = MemoryConfig(offload_parameters=True, drop_gradients=True, offload_optimizer=True)
LAYOUTS = {
    "single": ParallelConfig(),
    "tp2-sp": ParallelConfig(tensor=2, sequence=True),
    "tp2": ParallelConfig(tensor=2),
    "pp2-vpp2": ParallelConfig(pipeline=2, virtual_pipeline=2),
    "tp2-sp-pp2": ParallelConfig(tensor=2, pipeline=2, sequence=True),
    "cp2-dp2": ParallelConfig(context=2, data=2),
}
MARKS = {"single": (), "tp2-sp": pytest.mark.slow, "pp2-vpp2": pytest.mark.slow, "cp2-dp2": pytest.mark.slow}
PARAMETERS = [pytest.param(name, marks=MARKS.get(name, pytest.mark.full)) for name in LAYOUTS]
NAMES = ("value_loss", "value_grad_norm", "value_clip_fraction", "explained_variance", "value_mean", "return_mean")


def settings(layout="single"):
    critic = CriticConfig(learning_rate=RATE, eps=1e-2, epochs=3, clip_values=CLIP, updates_alone=3)
    return TrainerConfig(
        parallel=LAYOUTS[layout], optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64, micro_batch_size=4,
        policy=PolicyConfig.model_validate({"advantage": ADVANTAGE}), critic=critic,
    )  # fmt: skip


class Plain:
    """A critic of transformers' layers in float64, and AdamW by hand."""

    def __init__(self, directory):
        import torch
        from transformers import AutoModel

        self.trunk = AutoModel.from_pretrained(directory, dtype=torch.float64).eval()
        self.head = torch.nn.Linear(self.trunk.config.hidden_size, 1, dtype=torch.float64)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.weights = [*self.trunk.parameters(), *self.head.parameters()]
        self.moments = [[torch.zeros_like(weight), torch.zeros_like(weight)] for weight in self.weights]
        self.updates = 0

    def values(self, samples):
        """Value of each token that the policy has sampled, for each usable sample."""
        import torch

        starts = np.cumsum(samples.lengths) - samples.lengths
        for row in np.flatnonzero(samples.usable):
            tokens = samples.tokens[starts[row] : starts[row] + samples.lengths[row]].astype(np.int64)
            hidden = self.trunk(torch.from_numpy(tokens)[None]).last_hidden_state[0]
            yield self.head(hidden)[places_of(samples, row) - 1, 0]

    def iteration(self, samples):
        """Figures of the updates of an iteration, and the advantages of each sample."""
        import torch

        old = [value.detach() for value in self.values(samples)]
        rewards = samples.rewards[samples.usable]
        advantages = [
            torch.tensor(gae_by_loops(float(reward), value.tolist(), GAMMA, LAMBDA))
            for reward, value in zip(rewards, old, strict=True)
        ]
        returns = torch.cat(advantages) + torch.cat(old)
        losses, norms, clipped = [], [], []
        for _ in range(3):
            now = torch.cat(list(self.values(samples)))
            near = torch.cat(old) + (now - torch.cat(old)).clamp(-CLIP, CLIP)
            errors = (now - returns) ** 2 / 2, (near - returns) ** 2 / 2
            loss = torch.maximum(*errors).mean()
            losses.append(loss.item())
            clipped.append((errors[1] > errors[0]).double().mean().item())
            norms.append(self.step(loss))
        unexplained = (returns - torch.cat(old)).var(correction=0) / returns.var(correction=0)
        figures = [*map(np.mean, (losses, norms, clipped)), 1 - unexplained.item()]
        figures += [torch.cat(old).mean().item(), returns.mean().item()]
        return dict(zip(NAMES, figures, strict=True)), advantages

    def step(self, loss):
        import torch

        self.updates += 1
        gradients = torch.autograd.grad(loss, self.weights, allow_unused=True)
        norm = math.sqrt(sum(float((one**2).sum()) for one in gradients if one is not None))
        with torch.no_grad():
            for weight, gradient, (mean, square) in zip(self.weights, gradients, self.moments, strict=True):
                gradient = torch.zeros_like(weight) if gradient is None else gradient * min(1.0, 1 / (norm + 1e-6))
                mean.mul_(0.9).add_(0.1 * gradient)
                square.mul_(0.95).add_(0.05 * gradient**2)
                change = mean / (1 - 0.9**self.updates) / ((square / (1 - 0.95**self.updates)).sqrt() + 1e-2)
                weight.sub_(RATE * change)
        return norm


def in_double(rank, world_size, store, directory):
    """Figures of two iterations, the values after them, and the norm of the policy's gradient in the second."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.trainer_core.phases.plain import responses_of

    plain = Plain(directory)
    found = [plain.iteration(samples) for samples in ITERATIONS]
    policy, every = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval(), torch.cat(found[1][1])
    weighed = [
        -(own - every.mean()) / every.std() * torch.exp(one["logprobs"] - one["logprobs"].detach())
        for own, one in zip(found[1][1], responses_of(policy, ITERATIONS[1], 1.0), strict=True)
    ]
    gradients = torch.autograd.grad(torch.cat(weighed).mean(), list(policy.parameters()))
    norm = math.sqrt(sum(float((one**2).sum()) for one in gradients))
    with torch.no_grad():
        after = torch.cat(list(plain.values(ITERATIONS[0]))).numpy()
    return [figures for figures, _ in found], after, norm


@pytest.fixture(scope="module")
def expected(model_dir):
    return run_ranks(1, in_double, model_dir)[0]


def walk(trainer, folder, elsewhere):
    """Two iterations, the first of the critic alone. From a state between them the second is done twice, once after all
    memory was freed. Also the values at the end, and the second iteration from a state of another layout."""
    trainer.import_model()
    begun, first, saved = trainer.state_identity(), trainer.train_policy(ITERATIONS[0], 1.0), trainer.save(folder)
    assert {name for name in saved.names if name.startswith(f"{CRITIC}/weights.")}
    identity, ends = saved.identity, []
    for frees in (MemoryConfig(), EVERYTHING):
        freed = trainer.release(frees)
        assert (freed > trainer._critic.model.release(frees)) == frees.in_use
        assert trainer._critic.model.residence.has_parameters != frees.in_use
        ends.append((trainer.train_policy(ITERATIONS[1], 1.0), trainer.state_identity(), identity))
        values, identity = trainer._critic.values(ITERATIONS[0]), trainer.load(folder).identity
    moved = None if elsewhere is None else (trainer.load(elsewhere).identity, trainer.train_policy(ITERATIONS[1], 1.0))
    return begun, first, ends, values, moved


@pytest.fixture(scope="module")
def alone(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_trainers(model_dir, settings(), walk, folder, None)


@pytest.mark.parametrize("layout", PARAMETERS)
def test_updates_are_those_of_float64_and_the_state_moves(model_dir, expected, alone, tmp_path, layout):
    figures, after, norm = expected
    folder, own = alone
    found = own if layout == "single" else run_trainers(model_dir, settings(layout), walk, tmp_path, folder)
    for begun, first, ends, values, moved in found:
        assert ends[0] == ends[1]  # the second from the state that was saved, bit for bit
        second, identity, saved = ends[0]
        assert (first["steps"], second["steps"]) == (0, 1)
        assert begun.tensors == saved.tensors != identity.tensors  # of the policy
        assert len({begun.critic, saved.critic, identity.critic}) == 3
        for report, wanted in zip((first, second), figures, strict=True):
            assert {name: report[name] for name in NAMES} == pytest.approx(wanted, rel=2e-4, abs=2e-5)
            assert 0 < report["value_clip_fraction"] < 1
        assert second["grad_norm"] == pytest.approx(norm, rel=1e-4)
        counted = ITERATIONS[0].per_response_token(ITERATIONS[0].usable)
        np.testing.assert_allclose(values[counted], after, rtol=0, atol=2e-5)
        assert not values[~counted].any()
        if moved is not None:
            there, theirs = own[0][2][0][2], moved[0]
            assert (theirs.critic, theirs.tensors) == (there.critic, there.tensors)
            assert moved[1]["value_loss"] == pytest.approx(figures[1]["value_loss"], rel=2e-4)


def test_a_state_with_a_critic_needs_one_and_the_reverse(alone):
    folder, _ = alone
    with pytest.raises(InputError, match=r"holds a critic, but the trainer has no critic: add \[train.critic\]"):
        check_critic(folder, False)
    with pytest.raises(InputError, match=r"holds no critic, but the trainer has a critic: leave \[train.critic\] out"):
        check_critic(folder / CRITIC, True)


def test_the_critic_of_two_states_is_compared(alone, tmp_path):
    folder, _ = alone
    other = shutil.copytree(folder, tmp_path / "other")
    same, policy = compare_states(folder, other), compare_states(folder / CRITIC, other / CRITIC)
    assert not same.differences
    assert same.weights > policy.weights > 0
    path = other / CRITIC / "weights.0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()  # its other name is the file that the trainer had mapped
    path.write_bytes(content)
    (line,) = compare_states(folder, other).differences
    assert line.startswith(f"{CRITIC}/") and "1 of" in line
    shutil.rmtree(other / CRITIC)
    assert compare_states(folder, other).differences == (f"{CRITIC}: only in {folder}",)


def experts(trainer):
    trainer.import_model()
    return [trainer.train_policy(samples, 1.0) for samples in ITERATIONS]


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_a_critic_with_experts_learns_alike_on_two_layouts(tmp_path, family):
    run_ranks(1, make_family, str(tmp_path), family)
    divided = settings().model_copy(update={"parallel": ParallelConfig(data=2, expert=2)})
    found = [run_trainers(str(tmp_path), config, experts)[0] for config in (settings(), divided)]
    for own, theirs in zip(*found, strict=True):
        names = {*NAMES, "grad_norm", "entropy"} & own.keys()
        assert {name: own[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-4)
    assert found[0][1]["steps"] == 1
