"""Six updates, moved to another layout after three, against transformers in float64 and an AdamW written by hand."""

import dataclasses
import math

import numpy as np
import pytest

from tests.trainer_core.models import make_model, random_samples, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.phases.plain import responses_of
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig

OPTIMIZER = OptimizerConfig(
    learning_rate=2e-3, min_learning_rate=1e-4, warmup_steps=2, decay="cosine", decay_steps=6, weight_decay=0.1,
    clip_grad=0.05, eps=1e-3, beta1=0.8, beta2=0.9,
)  # fmt: skip
POLICY = PolicyConfig.model_validate(
    {
        "kl_coefficient": 0.3, "entropy_coefficient": 0.02, "loss_aggregation": "sequence",
        "correction": {"type": "truncate", "level": "token", "limit": 1.3},
        "overlong": {"type": "penalty", "length": 8, "buffer": 4},
    }
)  # fmt: skip
TEMPERATURE = 0.7
UPDATES, MOVED_AFTER = 6, 3


def samples(update):
    drawn, generator = random_samples(update), np.random.default_rng(100 + update)
    near = -4.6 + 0.4 * generator.standard_normal(len(drawn.engine_logprobs))
    return dataclasses.replace(drawn, engine_logprobs=near.astype(np.float32))


def settings(parallel):
    return TrainerConfig(optimizer=OPTIMIZER, policy=POLICY, max_length=64, parallel=parallel, micro_batch_tokens=24)


def begin(trainer, folder):
    trainer.import_model()
    trainer.save(f"{folder}/reference")
    trainer.load_reference(f"{folder}/reference", "the first weights")
    found = [trainer.train_policy(samples(update), TEMPERATURE, True) for update in range(MOVED_AFTER)]
    trainer.save(f"{folder}/state")
    return found


def go_on(trainer, folder):
    trainer.load(f"{folder}/state")
    trainer.load_reference(f"{folder}/reference", "the first weights")
    found = [trainer.train_policy(samples(update), TEMPERATURE, True) for update in range(MOVED_AFTER, UPDATES)]
    export(trainer, f"{folder}/trained")
    return found


def objective(model, reference, drawn):
    """The loss of one update, sample by sample."""
    import torch

    rewards = drawn.rewards.astype(float) - np.clip((drawn.response_lengths - 4) / 4, 0, 1)
    losses = []
    with torch.no_grad():
        kept = [one["logprobs"] for one in responses_of(reference, drawn, TEMPERATURE)]
    for one, before in zip(responses_of(model, drawn, TEMPERATURE), kept, strict=True):
        group = rewards[(drawn.groups == one["group"]) & drawn.usable]
        advantage = (rewards[one["row"]] - group.mean()) / (group.std(ddof=1) + 1e-6)
        own, change = one["logprobs"], before - one["logprobs"]
        weight = torch.exp(own.detach() - one["behaviour"]).clamp(max=1.3)
        surrogate = -advantage * torch.exp(own - own.detach()) * weight
        losses.append((surrogate + 0.3 * (torch.exp(change) - 1 - change) - 0.02 * one["entropy"]).mean())
    return torch.stack(losses).mean()


def rate(update):
    """Learning rate of an update, counted from 1: up over two, then down a half cosine."""
    if update <= 2:
        return 2e-3 * update / 2
    return 1e-4 + (2e-3 - 1e-4) * (1 + math.cos(math.pi * (update - 2) / 4)) / 2


def adam_by_hand(rank, world_size, store, directory):
    """Reported figures of each update, and the weights before the first and after the last."""
    import torch
    from transformers import Qwen3ForCausalLM

    model, reference = (Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float64).eval() for _ in range(2))
    weights = dict(model.named_parameters())
    first = {name: weight.detach().numpy().copy() for name, weight in weights.items()}
    moments = {name: [torch.zeros_like(weight), torch.zeros_like(weight)] for name, weight in weights.items()}
    reports = []
    for update in range(1, UPDATES + 1):
        loss = objective(model, reference, samples(update - 1))
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float((weight.grad**2).sum()) for weight in weights.values()))
        reports.append({"loss": loss.item(), "grad_norm": norm, "learning_rate": rate(update)})
        with torch.no_grad():
            for name, weight in weights.items():
                _step(weight, moments[name], update, min(1.0, 0.05 / (norm + 1e-6)))
    return reports, first, {name: weight.detach().numpy() for name, weight in weights.items()}


def _step(weight, moments, update, scale):
    """AdamW of one tensor; only matrices decay."""
    moments[0].mul_(0.8).add_(0.2 * weight.grad * scale)
    moments[1].mul_(0.9).add_(0.1 * (weight.grad * scale) ** 2)
    if weight.ndim > 1:
        weight.mul_(1 - rate(update) * 0.1)
    mean, square = moments[0] / (1 - 0.8**update), moments[1] / (1 - 0.9**update)
    weight.sub_(rate(update) * mean / (square.sqrt() + 1e-3))


@pytest.mark.slow
def test_six_updates_are_those_of_adam_by_hand(tmp_path):
    model, folder = str(tmp_path / "model"), str(tmp_path)
    run_ranks(1, make_model, model, True)
    found = run_trainers(model, settings(ParallelConfig()), begin, folder)[0]
    found += run_trainers(model, settings(ParallelConfig(data=2)), go_on, folder)[0]
    ((reports, first, last),) = run_ranks(1, adam_by_hand, model)
    for metrics, report in zip(found, reports, strict=True):
        assert {name: metrics[name] for name in report} == pytest.approx(report, rel=2e-5, abs=2e-7)
    trained = read_export(f"{folder}/trained")
    for name, values in trained.items():
        moved = np.abs(last[name] - first[name]).max()
        rounding = UPDATES * np.spacing(np.abs(values).max())
        assert np.abs(values - last[name]).max() < 1e-4 * moved + rounding, name
