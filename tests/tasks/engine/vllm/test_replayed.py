"""Routing replay from an engine to a trainer: it computes with the experts that the engine has chosen."""

import dataclasses

import numpy as np
import pytest

from tasks.engine.protocol import EngineSpec, Sampling
from tests.tasks.engine.vllm.test_routes import FAMILIES, PROMPTS, SAMPLING, SEEDS, routes_of
from tests.tasks.engine_process import VOCABULARY, engine_process
from tests.trainer_core.ranks import run_trainers
from trainer_core.batches.sequences import Samples
from trainer_core.config import TrainerConfig


def samples_of(batch, prompts):
    """A batch as the trainer is given it."""
    tokens = [[*prompt, *own] for prompt, own in zip(prompts, batch["response_tokens"].to_pylist(), strict=True)]
    rows = [np.frombuffer(one, np.uint8) for one in batch["routes"].to_pylist()]
    return Samples(
        tokens=np.concatenate(tokens).astype(np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in prompts]),
        response_lengths=np.array([len(own) for own in batch["response_tokens"]]),
        engine_logprobs=batch["logprobs"].flatten().to_numpy(),
        rewards=np.zeros(len(prompts), np.float32),
        groups=np.zeros(len(prompts), np.int32),
        usable=np.ones(len(prompts), bool),
        routes=np.concatenate([row.reshape(len(own) - 1, -1) for row, own in zip(rows, tokens, strict=True)]),
    )


def scored_both_ways(trainer, samples):
    """Log-probabilities with the experts of the engine and with those of the trainer's routers, each with the experts
    that were used: (positions, layers, k), ascending."""
    from megatron.core.transformer.moe.router import TopKRouter

    used = []

    def note(router):
        routing = router.routing

        def noted(*given, **more):
            probabilities, chosen = routing(*given, **more)
            used.append(chosen.nonzero()[:, 1].reshape(-1, router.topk).numpy())
            return probabilities, chosen

        router.routing = noted

    trainer.import_model()
    for module in (one for chunk in trainer._model.modules for one in chunk.modules() if isinstance(one, TopKRouter)):
        note(module)
    found = []
    for given in (samples, dataclasses.replace(samples, routes=None)):
        used.clear()
        scores = trainer._passes.score(given, np.arange(len(samples)), SAMPLING.temperature)
        found.append((scores.logprobs, np.stack(used, 1)))
    return found


def trained_on(directory, batch, precision, prompts=PROMPTS):
    """`scored_both_ways` of a batch by a trainer with that model, with the routes of the engine."""
    settings = {"optimizer": {"learning_rate": 1e-3}, "max_length": 64, "precision": precision}
    config = TrainerConfig.model_validate({**settings, "experts": {"replay": True}})
    samples = samples_of(batch, prompts)
    (found,) = run_trainers(directory, config, scored_both_ways, samples)
    return samples, np.concatenate(routes_of(batch, prompts)), found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_uses_the_experts_of_the_engine(experts, family):
    batch = experts[family].engine.generate(PROMPTS, SEEDS, SAMPLING)
    samples, routes, ((logprobs, used), _) = trained_on(experts[family].old, batch, "fp32")
    np.testing.assert_array_equal(used, routes)  # token by token
    np.testing.assert_allclose(logprobs, samples.engine_logprobs, rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_replay_brings_engine_and_trainer_together(family, tmp_path, tmp_path_factory):
    with engine_process(tmp_path_factory) as process:
        process.Reference().make_family(str(tmp_path), 0, family)
        limits = {"max_model_len": 64, "max_num_seqs": 64, "kv_cache_bytes": 16 << 20}
        engine = process.Engine(EngineSpec(model_dir=str(tmp_path), dtype="bfloat16", routes=True, **limits))
        prompts = [np.random.default_rng(place).integers(2, VOCABULARY, 12).tolist() for place in range(64)]
        batch = engine.generate(prompts, range(64), Sampling(max_tokens=48))
    samples, routes, ((given, used), (own, chosen)) = trained_on(str(tmp_path), batch, "bf16", prompts)
    np.testing.assert_array_equal(used, routes)
    after, before = (np.abs(one - samples.engine_logprobs) for one in (given, own))
    others = (chosen != routes).any(-1)  # (positions, layers)
    figures = {"before": (before.mean(), before.max()), "after": (after.mean(), after.max()), "others": others.mean()}
    assert others.any(), figures
    assert after.mean() < before.mean(), figures
