"""The engine against transformers, on a real vLLM."""

import subprocess
import sys

import numpy as np
import pytest

from storage.errors import InputError
from tasks.engine.protocol import COMPLETIONS, EngineSpec, Sampling
from tasks.engine.vllm.engine import Engine
from tests.tasks.engine_process import CONTEXT, EOS, VOCABULARY, log_softmax
from tests.tasks.engine_update import serve

TOLERANCE = 1e-4  # nat; the bar is 1e-3
PROMPTS = [np.random.default_rng(place).integers(2, VOCABULARY, 5 + place % 9).tolist() for place in range(24)]
SEEDS = list(range(1000, 1024))
PLAIN = Sampling(max_tokens=8)


def responses(batch):
    return list(zip(batch["response_tokens"].to_pylist(), batch["logprobs"].to_pylist(), strict=True))


def assert_agrees(served, which, sampling=PLAIN, prompts=PROMPTS):
    """Every sampled token has the log-probability that transformers gives it under the model `which`."""
    batch = served.engine.generate(prompts, SEEDS[: len(prompts)], sampling)
    for prompt, (response, logprobs) in zip(prompts, responses(batch), strict=True):
        logits = served.reference.logits(vars(served)[which], prompt + response)[len(prompt) - 1 :]
        expected = log_softmax(logits / (sampling.temperature or 1.0))[np.arange(len(response)), response]
        np.testing.assert_allclose(logprobs, expected, atol=TOLERANCE)
    return batch


@pytest.fixture
def fresh(served, tmp_path_factory):
    """The engine with the weights of `old`, after any changes by an earlier test."""
    serve(served, tmp_path_factory.mktemp("fresh") / "update", "old", 0)
    return served


def test_on_cpu_the_first_model_runner_computes(served):
    assert served.engine.runner() == "first"


@pytest.mark.parametrize("after", [1, 7, 19])
def test_a_response_goes_on_from_its_beginning_as_if_nothing_had_happened(served, after):
    whole = responses(served.engine.generate(PROMPTS, SEEDS, Sampling(max_tokens=20)))
    begun = [prompt + tokens[:after] for prompt, (tokens, _) in zip(PROMPTS, whole, strict=True)]
    rest = responses(served.engine.generate(begun, SEEDS, Sampling(max_tokens=20 - after)))
    assert [tokens for tokens, _ in rest] == [tokens[after:] for tokens, _ in whole]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_distribution_sampled_from(fresh, temperature):
    batch = assert_agrees(fresh, "old", Sampling(max_tokens=8, temperature=temperature))
    assert batch.schema == COMPLETIONS
    assert batch["finish_reason"].to_pylist() == ["length"] * len(PROMPTS)


def test_logprobs_are_renormalised_over_the_nucleus(fresh):
    sampling = Sampling(max_tokens=1, top_p=0.6)
    batch = fresh.engine.generate(PROMPTS, SEEDS, sampling)
    for prompt, ((token,), (logprob,)) in zip(PROMPTS, responses(batch), strict=True):
        likely = np.sort(np.exp(log_softmax(fresh.reference.logits(fresh.old, [*prompt, token])[-1])))[::-1]
        kept = likely[: int(np.searchsorted(np.cumsum(likely), sampling.top_p)) + 1]
        assert min(abs(logprob - np.log(kept / kept.sum()))) < TOLERANCE


def test_greedy_takes_the_likeliest_token(fresh):
    batch = fresh.engine.generate(PROMPTS[:4], SEEDS[:4], Sampling(max_tokens=4, temperature=0.0))
    for prompt, (response, _) in zip(PROMPTS[:4], responses(batch), strict=True):
        logits = fresh.reference.logits(fresh.old, prompt + response)[len(prompt) - 1 :]
        assert logits.argmax(axis=-1).tolist() == response


def test_full_blocks_of_an_earlier_turn_come_from_the_prefix_cache(fresh):
    def asked(prompt):
        fresh.engine.enqueue(0, [prompt], [7], Sampling(max_tokens=CONTEXT // 2))
        finished = []
        while not finished:
            finished = fresh.engine.collect(60.0).finished
        return finished[0].completions["response_tokens"].to_pylist()[0], finished[0].cached

    first, (none, block) = asked(PROMPTS[9])
    known = [*PROMPTS[9], *first]
    assert (none, len(known) > block) == (0, True)
    assert asked([*known, 5, 6])[1] == ((len(known) - 1) // block * block, block)


def test_a_seed_gives_the_same_sample_whatever_is_sampled_beside_it(fresh):
    first = fresh.engine.generate(PROMPTS, SEEDS, PLAIN)
    assert fresh.engine.generate(PROMPTS, SEEDS, PLAIN).equals(first)
    backwards = fresh.engine.generate(PROMPTS[::-1], SEEDS[::-1], PLAIN)
    assert backwards["response_tokens"].to_pylist()[::-1] == first["response_tokens"].to_pylist()
    one_prompt = fresh.engine.generate([PROMPTS[0]] * len(SEEDS), SEEDS, PLAIN)
    assert len({tuple(tokens) for tokens in one_prompt["response_tokens"].to_pylist()}) == len(SEEDS)


def test_a_response_ends_with_a_stop_token_and_no_other(fresh):
    def sample(stops):
        how = Sampling(max_tokens=60, stop_token_ids=stops)
        return fresh.engine.generate([[5, 6, 7]] * 16, list(range(16)), how)

    stopped = sample((EOS,))
    reasons = stopped["finish_reason"].to_pylist()
    assert "stop" in reasons
    for tokens, reason in zip(stopped["response_tokens"].to_pylist(), reasons, strict=True):
        assert (tokens[-1] == EOS) == (reason == "stop")
        assert EOS not in tokens[:-1]
    unstopped = sample(())
    assert set(unstopped["finish_reason"].to_pylist()) == {"length"}
    assert any(EOS in tokens for tokens in unstopped["response_tokens"].to_pylist())


def test_scores_equal_those_of_transformers(fresh):
    sequences = [*PROMPTS, list(np.random.default_rng(7).integers(2, VOCABULARY, CONTEXT - 1))]
    for sequence, scores in zip(sequences, fresh.engine.score(sequences), strict=True):
        expected = log_softmax(fresh.reference.logits(fresh.old, [int(token) for token in sequence]))
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected[np.arange(len(sequence) - 1), sequence[1:]], atol=TOLERANCE)


@pytest.mark.parametrize("length", [0, CONTEXT, 3 * CONTEXT])
def test_a_prompt_that_does_not_fit_is_refused(fresh, length):
    with pytest.raises(InputError, match=f"prompt 1 has {length} tokens; the engine accepts 1 to {CONTEXT - 1}"):
        fresh.engine.generate([[5], [5] * length], [0, 1], PLAIN)
    with pytest.raises(InputError, match="sequence 0"):
        fresh.engine.score([[5] * length])
    assert fresh.engine.generate([[5]], [0], PLAIN).num_rows == 1


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="no config"):
        Engine(EngineSpec(model_dir=str(tmp_path), max_model_len=8))


def test_specifications_are_light():
    code = (
        "import sys, tasks.engine.vllm.engine; "
        "print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
