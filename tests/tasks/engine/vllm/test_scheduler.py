"""The scheduler that answers with whole responses, against vLLM's own."""

import numpy as np
import pytest

from tasks.engine.ends import complete_after
from tasks.engine.protocol import EngineSpec, Sampling
from tests.tasks.engine.vllm.test_engine import PROMPTS, SEEDS, responses
from tests.tasks.engine_process import CONTEXT
from tests.tasks.engine_scheduling import BYTES
from tests.tasks.engine_update import serve

LONG = Sampling(max_tokens=20, stop_token_ids=(1, 2))


@pytest.fixture
def engine(served, tmp_path_factory):
    """The engine with the weights of `old`, and nothing in flight."""
    serve(served, tmp_path_factory.mktemp("fresh") / "update", "old", 0)
    return served.engine


@pytest.fixture(scope="module")
def plain(engines):
    """vLLM's own engine, with those weights."""
    served = engines["qwen3", False]
    spec = EngineSpec(model_dir=served.old, max_model_len=CONTEXT, max_num_seqs=64, kv_cache_bytes=16 << 20)
    return served.process.PlainEngine(spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        LONG,
        Sampling(max_tokens=1),
        Sampling(max_tokens=9, temperature=0.7, top_p=0.8),
        Sampling(max_tokens=9, temperature=1.3, top_k=5),
        Sampling(max_tokens=9, min_p=0.2),
        Sampling(max_tokens=9, temperature=0.7, top_p=0.9, top_k=9, min_p=0.05),
    ],
)
def test_responses_have_the_bits_that_vllm_gives(engine, plain, sampling):
    batch = engine.generate(PROMPTS, SEEDS, sampling)
    found = [(*one, why) for one, why in zip(responses(batch), batch["finish_reason"].to_pylist(), strict=True)]
    assert found == plain.generate(PROMPTS, SEEDS, sampling)
    assert {why for *_, why in found} == ({"stop", "length"} if sampling is LONG else {"length"})


@pytest.mark.slow
def test_stop_texts_end_what_vllm_gives_without_them(engine, plain):
    without = Sampling(max_tokens=40)
    for stop in (("cab",), ("bb", "acca"), ("abcabcabcabcabcabcabc",)):
        sampling = without.model_copy(update={"stop": stop})
        batch = engine.generate(PROMPTS, SEEDS, sampling)
        found = [(*one, why) for one, why in zip(responses(batch), batch["finish_reason"].to_pylist(), strict=True)]
        ends = [complete_after(tokens, stop, BYTES) for tokens, _, _ in plain.generate(PROMPTS, SEEDS, without)]
        expected = [
            (tokens[:end], logprobs[:end], "length" if end is None else "stop")
            for (tokens, logprobs, _), end in zip(plain.generate(PROMPTS, SEEDS, without), ends, strict=True)
        ]
        assert found == expected
        assert any(ends) == (len(stop[0]) < 9)


def test_scores_have_the_bits_that_vllm_gives(engine, plain):
    assert [score.tolist() for score in engine.score(PROMPTS)] == plain.score(PROMPTS)


def test_nothing_is_kept_of_what_ended_or_was_dropped(engine):
    engine.generate(PROMPTS, SEEDS, LONG)
    assert engine.sampled_so_far() == {}
    engine.enqueue(0, PROMPTS, SEEDS, LONG)
    for _ in range(3):
        engine.collect(0.0)
    assert set(engine.sampled_so_far().values()) == {(3, 3)}
    engine.drop()
    assert engine.sampled_so_far() == {}


def test_a_response_is_whole_after_its_cache_was_taken(engine):
    greedy = Sampling(max_tokens=40, temperature=0.0)
    alone = engine.generate(PROMPTS[:6], SEEDS[:6], greedy)
    engine.enqueue(0, PROMPTS[:6], SEEDS[:6], greedy)
    for _ in range(5):
        engine.collect(0.0)
    engine.preempt()
    (batch,) = engine.collect(60.0).finished
    assert batch.completions["response_tokens"].equals(alone["response_tokens"])
    found, expected = (np.array(one["logprobs"].to_pylist()) for one in (batch.completions, alone))
    np.testing.assert_allclose(found, expected, atol=1e-5)  # computed in other pieces


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize(
    ("blocks", "together"),
    [
        pytest.param(400, 40, id="roomy", marks=pytest.mark.slow),
        pytest.param(60, 12, id="full", marks=pytest.mark.slow),
        pytest.param(30, 8, id="scarce"),
    ],
)
def test_requests_that_come_and_go_get_the_tokens_of_their_own_seeds(engines, ahead, blocks, together):
    served = engines["qwen3", False]
    for seed in range(4):
        told = served.process.Schedulers().run(served.old, seed, ahead, blocks, together)
        assert told["found"].keys() == told["expected"].keys()
        for name, tokens in told["expected"].items():
            found = told["found"][name]
            assert found == (tokens[: len(found)] if name in told["dropped"] else tokens)
        assert told["left"] == (0, 0, 0, 0, 0)
        assert len(told["found"]) > 50
        assert told["steady"] > (100 if together == 40 else 20)
