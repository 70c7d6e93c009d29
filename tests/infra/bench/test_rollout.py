"""The bench of the rollout: its output, that Ratchet's side is not slow, and that it leaves no process."""

import json
import subprocess
import sys

import numpy as np
import psutil
import pytest

from infra.bench.cases import CASES
from infra.bench.memory_limit import bytes_read
from infra.bench.rollout import _requests, bench_increments, bench_rollout
from storage.errors import InputError

KEYS = {"tokens_per_s", "generate_tokens_per_s", "plain_tokens_per_s", "ratio", "plain_ratio"}


@pytest.mark.full
def test_the_command_prints_one_object_and_the_engine_is_not_slow():
    done = subprocess.run(
        [sys.executable, "-m", "flows", "bench", "rollout", "--json", "--case=tiny", "--pairs=3"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["runner"] == found["bare_runner"] == "first"
    for lengths in (found["equal"], found["mixed"]):
        assert lengths.keys() >= KEYS
        assert lengths["ratio"] >= 0.9
    left = [one for one in psutil.process_iter(["cmdline"]) if "infra.bench.bare_engine" in (one.info["cmdline"] or [])]
    assert left == []


@pytest.mark.parametrize(("pairs", "samples", "tokens"), [(0, None, None), (1, 0, None), (1, 1, 0)])
def test_no_measurement_is_refused(pairs, samples, tokens):
    with pytest.raises(InputError, match=f"{pairs} pairs of {samples} samples of {tokens} tokens"):
        bench_rollout("tiny", pairs, samples, tokens)


@pytest.mark.full
def test_increments_are_stored_while_they_are_measured():
    found = bench_increments("tiny", 1, 16, 64, 16)
    assert found.equal.without_tokens_per_s > 0
    assert found.mixed.ratio > 0


def test_more_tokens_than_the_model_has_positions_are_refused():
    with pytest.raises(InputError, match="tiny has 128 positions: give at most 112 tokens, not 113"):
        bench_rollout("tiny", 1, 1, 113)


@pytest.mark.parametrize("name", CASES)
def test_mixed_responses_have_a_quarter_of_the_most_tokens_on_average(name):
    case = CASES[name]
    alike, mixed = (_requests(case, 20, mixed) for mixed in (False, True))
    assert len(alike.prompts) == len(alike.seeds) == 20
    assert alike.sampling.stop_token_ids == ()
    mean = case.model.vocabulary / len(mixed.sampling.stop_token_ids)
    assert mean == pytest.approx(case.response / 4, rel=0.05)
    assert len({tuple(prompt) for prompt in mixed.prompts}) == 3


def test_bytes_read_are_weights_of_each_step_and_what_each_token_finds_in_the_cache():
    model = CASES["tiny"].model.model_copy(update={"layers": 1, "hidden": 2, "intermediate": 3, "vocabulary": 5})
    heads = (4 + 2) * 32 * 2 * 2  # queries and output, keys and values
    weights, cached = heads + 3 * 2 * 3 + 5 * 2, 2 * 2 * 32
    assert bytes_read(model, "bf16", 7, np.array([1, 3])) == 2 * (3 * weights + (7 + 7 + 8 + 9) * cached)
