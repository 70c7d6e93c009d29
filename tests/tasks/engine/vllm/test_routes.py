"""Experts of each token: those that transformers gives it, however the engine has computed it."""

import dataclasses

import numpy as np
import pytest

from tasks.engine.protocol import Begun, EngineSpec, Sampling
from tests.tasks.engine_process import VOCABULARY, engine_process
from tests.tasks.engine_update import serve
from tests.trainer_core.ranks import run_trainers
from trainer_core.batches.sequences import Samples
from trainer_core.config import TrainerConfig

SHARED = np.random.default_rng(5).integers(2, VOCABULARY, 40).tolist()  # more than a block of the cache
PROMPTS: list[list[int]] = [[*SHARED, 2 + place, 9] for place in range(6)]
SEEDS = list(range(6))
SAMPLING = Sampling(max_tokens=12)
FAMILIES = ("qwen3-moe", "deepseek-v3")
LAYERS = {"qwen3-moe": 4, "deepseek-v3": 3}


@pytest.fixture(params=FAMILIES)
def served(experts, request, tmp_path_factory):
    """An engine with the weights of `old`, after any changes by an earlier test."""
    serve(experts[request.param], tmp_path_factory.mktemp("fresh") / "update", "old", 0)
    return experts[request.param]


def routes_of(batch, prompts=PROMPTS):
    """(positions, layers, k) of each row, ascending."""
    rows = [np.frombuffer(one, np.uint8) for one in batch["routes"].to_pylist()]
    lengths = [len(prompt) + len(own) - 1 for prompt, own in zip(prompts, batch["response_tokens"], strict=True)]
    return [np.sort(row.reshape(count, -1, 2), -1) for row, count in zip(rows, lengths, strict=True)]


def assert_routes(served, batch, which="old"):
    for prompt, response, found in zip(PROMPTS, batch["response_tokens"].to_pylist(), routes_of(batch), strict=True):
        np.testing.assert_array_equal(found, served.reference.routes(vars(served)[which], prompt + response))


def collected(served, begun=()):
    served.engine.enqueue(0, PROMPTS, SEEDS, SAMPLING, begun)
    (batch,) = served.engine.collect(60).finished
    return batch


def test_every_token_but_the_last_has_the_experts_of_transformers(served, tmp_path):
    batch = served.engine.generate(PROMPTS, SEEDS, SAMPLING)
    assert_routes(served, batch)
    again = collected(served)
    assert again.cached is not None
    assert again.cached[0] > 0  # positions that this request has not computed
    assert_routes(served, again.completions)
    serve(served, tmp_path / "new", "new", 1)
    assert_routes(served, served.engine.generate(PROMPTS, SEEDS, SAMPLING), "new")


def test_what_is_computed_again_has_the_same_routes(served):
    whole = served.engine.generate(PROMPTS, SEEDS, SAMPLING)
    tokens, logprobs = (whole[name].to_pylist() for name in ("response_tokens", "logprobs"))
    begun = [
        Begun(np.array(one[:5], np.int32), np.array(p[:5], np.float32)) for one, p in zip(tokens, logprobs, strict=True)
    ]
    assert_routes(served, collected(served, begun).completions)  # by another process, which is given the beginning
    served.engine.enqueue(0, PROMPTS, SEEDS, SAMPLING)
    for _ in range(3):
        served.engine.collect(0.0)
    served.engine.preempt()
    (batch,) = served.engine.collect(60).finished
    assert_routes(served, batch.completions)


def test_nothing_is_kept_of_what_nobody_asks_for(served):
    served.engine.enqueue(0, PROMPTS, SEEDS, SAMPLING)
    served.engine.enqueue(1, PROMPTS, SEEDS, SAMPLING)
    for _ in range(3):
        served.engine.collect(0.0)
    served.engine.score([PROMPTS[0]])  # drops them
    served.engine.generate(PROMPTS[:1], SEEDS[:1], SAMPLING)
    served.engine.generate(PROMPTS[:1], SEEDS[:1], SAMPLING)
    assert served.engine.kept_routes() == 1  # the last one: the worker is told of its end with the next step


def test_workers_that_share_a_layer_choose_alike(split, tmp_path):
    serve(split, tmp_path / "update", "old", 0, receivers=2)
    assert_routes(split, split.engine.generate(PROMPTS, SEEDS, SAMPLING))


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


def test_the_trainer_uses_the_experts_of_the_engine(served):
    samples, routes, ((logprobs, used), _) = trained_on(
        served.old, served.engine.generate(PROMPTS, SEEDS, SAMPLING), "fp32"
    )
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
