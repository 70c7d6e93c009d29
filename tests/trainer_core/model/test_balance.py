"""The auxiliary loss of routers: its gradient is that of the configured coefficient, and its value is the reported one.

All rewards of a group are equal, so the policy's gradient is 0, and the gradient is that of the auxiliary loss alone.
"""

import numpy as np
import pytest

from tests.trainer_core.model.matrix import MATRIX, SINGLE
from tests.trainer_core.models import VOCABULARY, make_family, random_examples
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.batches.micro_batching import BatchLimits, share
from trainer_core.batches.sequences import Samples
from trainer_core.config import ExpertsConfig, OptimizerConfig, TrainerConfig
from trainer_core.context_parallel import Context

COEFFICIENT = 0.01
LENGTHS = np.array([14, 11, 9, 14, 12, 14, 6, 14])
TOGETHER = 4
"""Sequences of a micro-batch."""


def samples(prompt):
    """The same sequences, with so many tokens in the prompt."""
    responses = LENGTHS - prompt
    return Samples(
        tokens=np.random.default_rng(3).integers(0, VOCABULARY, LENGTHS.sum()).astype(np.int32),
        prompt_lengths=np.full(len(LENGTHS), prompt),
        response_lengths=responses,
        engine_logprobs=np.full(responses.sum(), -4, np.float32),
        rewards=np.ones(len(LENGTHS), np.float32),
        groups=np.repeat([0, 1], 4).astype(np.int32),
        usable=np.ones(len(LENGTHS), bool),
    )


def settings(parallel, auxiliary_loss=COEFFICIENT):
    return TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=0.0),
        experts=ExpertsConfig(auxiliary_loss=auxiliary_loss),
        parallel=parallel,
        micro_batch_size=TOGETHER,
        max_length=64,
    )


def trained(trainer, prompts):
    trainer.import_model()
    found = [trainer.train_policy(samples(prompt), 1.0) for prompt in prompts]
    return found, trainer.train_supervised(random_examples(), 1, 8)


def micro_batches(parallel):
    """Rows of each micro-batch of a layout, of all ranks."""
    held = Context(parallel.context, 0).held(samples(1).positions)
    of_replicas = share(held, np.arange(len(LENGTHS)), parallel.data, BatchLimits(8192, TOGETHER))
    return [rows for replica in of_replicas for rows in replica]


def by_hand(rank, world_size, store, directory, batches):
    """Value and gradient norm in float64: E sum of f P over a layer's experts, of each micro-batch by its share."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, experts_implementation="eager")
    inputs = list[torch.Tensor]()
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda gate, given, _: inputs.append(given[0].flatten(0, -2) @ gate.weight.T)
        )
    sequences = np.split(samples(1).tokens.astype(np.int64), np.cumsum(LENGTHS)[:-1])
    positions, total = LENGTHS - 1, torch.zeros((), dtype=torch.float64)
    for rows in batches:
        of_sequences = []
        for row in rows:
            inputs.clear()
            model(torch.from_numpy(sequences[row][None, :-1]))
            of_sequences.append(torch.stack(inputs))
        logits = torch.cat(of_sequences, 1)  # (layers, T, E)
        shares = logits.softmax(-1)
        chosen = torch.zeros_like(shares).scatter_(-1, shares.topk(2, -1).indices, 1.0)
        balance = logits.shape[-1] * (chosen.mean(1) / 2 * shares.mean(1)).sum()
        total = total + COEFFICIENT * balance * positions[rows].sum() / positions.sum()
    total.backward()
    squares = [(weight.grad**2).sum() for weight in model.parameters() if weight.grad is not None]
    return float(total), float(torch.stack(squares).sum().sqrt())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {family: str(tmp_path_factory.mktemp(family)) for family in ("qwen3-moe", "deepseek-v3")}
    for family, folder in made.items():
        run_ranks(1, make_family, folder, family)
    return made


@pytest.mark.parametrize(
    "layout", ["cp2-ep2", *(pytest.param(name, marks=pytest.mark.slow) for name in (SINGLE, "dp2-ep2", "tp2-sp-pp2"))]
)
def test_the_coefficient_acts_as_configured_wherever_prompts_end(folders, layout):
    parallel, folder = MATRIX["qwen3-moe"][layout], folders["qwen3-moe"]
    ((value, norm),) = run_ranks(1, by_hand, folder, micro_batches(parallel))
    for found, _ in run_trainers(folder, settings(parallel), trained, (1, 5)):
        for metrics in found:
            assert metrics["auxiliary_loss"] == pytest.approx(value, rel=1e-5)
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert metrics["loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("layout", [SINGLE, pytest.param("tp2-sp-cp2-ep2-etp1", marks=pytest.mark.slow)])
def test_so_it_does_for_routers_with_biases(folders, layout):
    ((found, supervised), *_) = run_trainers(
        folders["deepseek-v3"], settings(MATRIX["deepseek-v3"][layout]), trained, (1, 5)
    )
    first, second = found
    assert 0 < first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)
    assert 0 < first["auxiliary_loss"] == pytest.approx(second["auxiliary_loss"], rel=1e-6)
    assert supervised["auxiliary_loss"] > 0


def test_without_a_coefficient_none_is_reported(folders):
    (found,) = run_trainers(folders["qwen3-moe"], settings(MATRIX["qwen3-moe"][SINGLE], 0.0), trained, (1,))
    assert all("auxiliary_loss" not in metrics for metrics in (*found[0], found[1]))
