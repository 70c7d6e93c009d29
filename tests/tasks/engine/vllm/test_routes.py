"""Experts of each token: those that transformers gives it, however the engine has computed it."""

import numpy as np
import pytest

from tasks.engine.protocol import Begun, Sampling
from tests.tasks.engine_process import VOCABULARY
from tests.tasks.engine_update import serve

SHARED = np.random.default_rng(5).integers(2, VOCABULARY, 40).tolist()  # more than a block of the cache
PROMPTS: list[list[int]] = [[*SHARED, 2 + place, 9] for place in range(6)]
SEEDS = list(range(6))
SAMPLING = Sampling(max_tokens=12)
FAMILIES = ("qwen3-moe", "deepseek-v3")
OF_ONE_FAMILY = pytest.mark.parametrize(
    "served", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)], indirect=True
)


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


@OF_ONE_FAMILY
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


@OF_ONE_FAMILY
def test_nothing_is_kept_of_what_nobody_asks_for(served):
    served.engine.enqueue(0, PROMPTS, SEEDS, SAMPLING)
    served.engine.enqueue(1, PROMPTS, SEEDS, SAMPLING)
    for _ in range(3):
        served.engine.collect(0.0)
    served.engine.score([PROMPTS[0]])  # drops them
    served.engine.generate(PROMPTS[:1], SEEDS[:1], SAMPLING)
    served.engine.generate(PROMPTS[:1], SEEDS[:1], SAMPLING)
    assert served.engine.kept_routes() == 1  # the last one: the worker is told of its end with the next step


@pytest.mark.slow
def test_workers_that_share_a_layer_choose_alike(split, tmp_path):
    serve(split, tmp_path / "update", "old", 0, receivers=2)
    assert_routes(split, split.engine.generate(PROMPTS, SEEDS, SAMPLING))
