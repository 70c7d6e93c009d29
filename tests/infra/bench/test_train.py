"""The bench of the trainer: its output, that both sides do the same work, and that Ratchet's is not slow."""

import json
import subprocess
import sys

import numpy as np
import pytest

from infra.bench.cases import CASES, draw_samples, floating_point_operations
from infra.bench.train import bench_train
from storage.errors import InputError
from tests.trainer_core.ranks import run_ranks

TINY = CASES["tiny"]
KEYS = {"tokens_per_s", "plain_tokens_per_s", "ratio", "packed_ratio", "mfu", "peak_gib", "save_critical_s"}


@pytest.mark.full
def test_the_command_prints_one_object_and_the_step_is_not_slow():
    done = subprocess.run(
        [sys.executable, "-m", "flows", "bench", "train", "--json", "--case=tiny", "--pairs=15"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() >= KEYS
    assert found["mfu"] is None
    assert found["save_critical_s"] > 0
    assert found["save_gib"] > 0.003  # weights and two moments of 0.4 million parameters
    assert 0.5 < found["step_time_drift"] < 2
    assert found["memory_growth_gib"] < 0.05
    assert found["ratio"] >= 0.9
    assert found["packed_ratio"] >= 1.15


def test_no_pairs_are_refused():
    with pytest.raises(InputError, match="0 pairs"):
        bench_train("tiny", 0)


def test_mixed_lengths_are_shorter_and_end_at_the_longest():
    samples = draw_samples(CASES["0.75b"], mixed=True)
    assert samples.response_lengths.max() == 1024
    assert samples.response_lengths.mean() < 0.5 * 1024
    assert len(samples.tokens) == samples.lengths.sum()


def test_operations_by_hand():
    shape = TINY.model
    layer = shape.hidden * (2 * 128 + 2 * 64) + 3 * shape.hidden * shape.intermediate
    found = floating_point_operations(TINY, np.array([10, 20]), predicted=7)
    assert found == 6 * (2 * layer * 30 + shape.hidden * shape.vocabulary * 7) + 6 * 2 * 128 * (10**2 + 20**2)


def both_losses(rank, world_size, store, folder):
    """Mean negative log-probability of the response tokens by both sides."""
    from pathlib import Path

    from infra.bench.train import _sides
    from tasks.data.generated import generate_model

    generate_model(Path(folder), TINY.model, seed=0)
    sides = _sides(folder, TINY, "cpu", fp8=False)
    samples = draw_samples(TINY, mixed=True)
    rows = np.arange(len(samples))
    ours = sides._phase.passes.score(samples, rows, 1.0).logprobs.sum()
    plain = sides.plain(sides.padded(samples, TINY.rows))
    sides.close()
    return -float(ours), plain


@pytest.mark.full
def test_both_sides_compute_the_same(tmp_path):
    ((ours, plain),) = run_ranks(1, both_losses, str(tmp_path))
    assert ours == pytest.approx(plain, rel=1e-5)
