"""The engine against transformers and against broken weight transfers, on a real vLLM."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from storage.errors import InputError, SyncMismatch
from tasks.engine.engine import Engine
from tasks.engine.protocol import COMPLETIONS, EngineSpec, Sampling, weights_digest
from tests.tasks.engine_process import CONTEXT, EOS, VOCABULARY, log_softmax, weights_of
from trainer_core.weights.digest import tensor_digest
from trainer_core.weights.records import TensorRecord

TOLERANCE = 1e-4  # nat; the bar is 1e-3
QUERY = "model.layers.1.self_attn.q_proj.weight"
PROMPTS = [np.random.default_rng(place).integers(2, VOCABULARY, 5 + place % 9).tolist() for place in range(24)]
SEEDS = list(range(1000, 1024))
PLAIN = Sampling(max_tokens=8)


def record(name, array, file):
    tensor = torch.from_numpy(array)
    digest = tensor_digest(tensor)
    return TensorRecord(name=name, dtype="float32", shape=tuple(array.shape), digest=digest, file=file)


def export(directory, weights, chunks=2):
    """Write `weights` as a trainer would: records, and files of whole layers."""
    names = sorted(weights)
    files = {name: f"chunk-{place * chunks // len(names)}.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, directory / file)
    return [record(name, weights[name], files[name]) for name in names]


def sync(served, which, version, directory):
    records = export(directory, weights_of(vars(served)[which]))
    return served.engine.receive(str(directory), version, records), records


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
    """The engine with the weights of `old`, whatever an earlier test did to it."""
    sync(served, "old", 0, tmp_path_factory.mktemp("fresh"))
    return served


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


@pytest.mark.parametrize("model", [("qwen3", False), ("qwen3", True), ("llama", True)])
def test_new_weights_are_served_in_place(engines, tmp_path, model):
    served = engines[model]
    shared = [list(np.random.default_rng(3).integers(2, VOCABULARY, 70))] * 4  # fills the prefix cache
    for which, version in (("old", 4), ("new", 5), ("old", 6)):
        folder = tmp_path / str(version)
        folder.mkdir()
        receipt, records = sync(served, which, version, folder)
        assert receipt.version == version
        assert receipt.digests == {record.name: record.digest for record in records}
        assert receipt.weights_digest == weights_digest(receipt.digests)
        assert receipt.bytes == sum(file.stat().st_size for file in folder.iterdir())
        held = served.engine.identity()
        assert (held.weight_version, held.weights_digest) == (version, receipt.weights_digest)
        assert_agrees(served, which)
        assert_agrees(served, which, prompts=shared)


def corrupted(weights):
    weights[QUERY][3, 5] = np.nextafter(weights[QUERY][3, 5], np.inf)  # one bit


def swapped(weights):
    weights[QUERY][[0, 1]] = weights[QUERY][[1, 0]]


def dropped_on_the_way(weights):
    del weights["model.norm.weight"]


def another_type(weights):
    weights[QUERY] = weights[QUERY].astype(np.float16)


def another_shape(weights):
    weights[QUERY] = weights[QUERY].reshape(64, -1)


DAMAGE = [corrupted, swapped, dropped_on_the_way, another_type, another_shape]


def assert_refused(served, directory, records, message):
    with pytest.raises(SyncMismatch, match=message):
        served.engine.receive(str(directory), 9, records)
    assert served.engine.identity().weight_version is None
    with pytest.raises(SyncMismatch, match="sync the weights again"):
        served.engine.generate(PROMPTS, SEEDS, PLAIN)
    with pytest.raises(SyncMismatch, match="sync the weights again"):
        served.engine.score(PROMPTS)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_on_the_way_is_found_and_repaired_by_the_next_sync(fresh, tmp_path, damage):
    weights = weights_of(fresh.new)
    records = export(tmp_path, weights, chunks=3)
    damaged = {name: array.copy() for name, array in weights.items()}
    damage(damaged)
    for file in {record.file for record in records}:
        names = [record.name for record in records if record.file == file and record.name in damaged]
        save_file({name: damaged[name] for name in names}, tmp_path / file)
    assert_refused(fresh, tmp_path, records, "norm" if damage is dropped_on_the_way else QUERY)
    repaired = tmp_path / "repaired"
    repaired.mkdir()
    sync(fresh, "new", 10, repaired)
    assert_agrees(fresh, "new")


@pytest.mark.parametrize(
    "left_out",
    [
        {"model.norm.weight"},
        {QUERY},
        {QUERY.replace("q_proj", "k_proj"), QUERY.replace("q_proj", "v_proj")},
        {"model.layers.0.mlp.up_proj.weight"},
        {"lm_head.weight", "model.embed_tokens.weight"},
    ],
)
def test_an_incomplete_export_is_refused(fresh, tmp_path, left_out):
    weights = weights_of(fresh.new)
    records = export(tmp_path, {name: array for name, array in weights.items() if name not in left_out})
    assert_refused(fresh, tmp_path, records, f"{len(left_out)} .*{min(left_out)}.* missing")
    repaired = tmp_path / "repaired"
    repaired.mkdir()
    sync(fresh, "new", 10, repaired)
    assert_agrees(fresh, "new")


@pytest.mark.parametrize("name", ["model.layers.7.mlp.up_proj.weight", QUERY])
def test_a_tensor_of_another_architecture_is_refused(fresh, tmp_path, name):
    weights = weights_of(fresh.new) | {name: np.ones((2, 2), np.float32)}
    assert_refused(fresh, tmp_path, export(tmp_path, weights), f"tensor {name} .*of the weight update has ")


def test_a_tensor_that_comes_twice_is_refused(fresh, tmp_path):
    weights = weights_of(fresh.new)
    records = export(tmp_path, weights)
    save_file({QUERY: weights[QUERY]}, tmp_path / "again.safetensors")
    again = [*records, record(QUERY, weights[QUERY], "again.safetensors")]
    assert_refused(fresh, tmp_path, again, f"tensor {QUERY} is in the weight update twice")


def test_an_empty_export_is_refused(fresh, tmp_path):
    assert_refused(fresh, tmp_path, [], "exported nothing")


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="no config"):
        Engine(EngineSpec(model_dir=str(tmp_path), max_model_len=8))


def test_specifications_are_light():
    code = "import sys, tasks.engine.engine; print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
