"""The whole loop on the real stack: Prefect, Ray, Megatron ranks over gloo, vLLM on CPU, an object store."""

import re

import numpy as np
import pytest

from storage.backends.root import open_root
from storage.manifest import need
from storage.parts import read_table
from storage.schema import REWARD, ROLLOUT
from tasks.config.code_version import PROJECT_ROOT
from tasks.stages.names import Stage
from tests.integration.command import NOTEBOOK, PIECES, RUN, TINY, committed, python, ratchet, run_tiny
from tests.pages import examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLES = PROJECT_ROOT / "infra" / "examples"
NAMES = {"my-run": RUN, "my.toml": str(TINY)}
"""Names in the examples of pages, and their replacements here."""


def test_the_stored_tables_fit_together(whole):
    store = open_root(whole)
    rollouts = read_table(store, committed(whole, 1, Stage.ROLLOUT), ROLLOUT)
    rewards = read_table(store, committed(whole, 1, Stage.REWARD), REWARD)
    assert rollouts.num_rows == rewards.num_rows == 16 * 8
    assert rollouts["prompt_id"].equals(rewards["prompt_id"])
    assert set(rollouts["weight_version"].combine_chunks().flatten().to_pylist()) == {0}
    assert len(set(rollouts["seed"].to_pylist())) == rollouts.num_rows
    lengths = rollouts["response_tokens"].combine_chunks().value_lengths()
    assert lengths.equals(rollouts["logprobs"].combine_chunks().value_lengths())
    assert (rollouts["logprobs"].combine_chunks().flatten().to_numpy() <= 0).all()
    assert set(rewards["status"].to_pylist()) == {"ok"}


def test_the_cursor_goes_on_and_weights_change_every_iteration(whole):
    synced = [committed(whole, iteration, Stage.WEIGHT_SYNC) for iteration in range(3)]
    assert [manifest.facts["weight_version"] for manifest in synced] == [0, 1, 2]
    assert [committed(whole, iteration, Stage.ROLLOUT).facts["cursor"] for iteration in (1, 2)] == [16, 32]
    assert len({manifest.facts["weights_digest"] for manifest in synced}) == 3
    assert all(manifest.metrics["probe_diff_max"] < 1e-3 for manifest in synced)


def test_engine_and_trainer_agree_on_what_was_sampled(whole):
    for iteration in (1, 2):
        metrics = committed(whole, iteration, Stage.TRAIN).metrics
        assert metrics["engine_logprob_diff_max"] < 1e-3
        assert np.isfinite([metrics["loss"], metrics["grad_norm"], metrics["kl_reference"]]).all()
        assert metrics["grad_norm"] > 0


def test_a_finished_run_does_nothing_again(whole, home, tmp_path):
    before = committed(whole, 2, Stage.TRAIN)
    again = python(tmp_path, home, "-c", examples("python.md", "Train", {**NAMES, "./runs": whole}))
    assert again.code == 0, again.err
    assert re.match(r"2 0\.\d+ s3:", again.out)
    assert again.err.count("nothing to do: run proof already has all 2 iterations") == 2
    assert committed(whole, 2, Stage.TRAIN) == before


def test_a_changed_meaning_is_refused_with_both_values(whole, home):
    refused = run_tiny(whole, home, "--set", "rollout.temperature=0.5")
    assert refused.code == 2
    assert "rollout.temperature: the run was started with 1.0, but is now given 0.5" in refused.err
    assert "Traceback" not in refused.err


def test_a_fork_with_another_learning_rate_and_layout_goes_its_own_way(whole, home, tmp_path):
    change = ["--set", "train.optimizer.learning_rate=1.02e-3"]
    forked = ratchet("fork", f"{RUN}@1", "--run", "fork", "--root", whole, *change, home=home)
    assert forked.code == 0, forked.err
    # as many samples share a step as in the run: on some processors that decides the last bits
    settings = [change[1], "train.parallel.tensor=2", PIECES[1]]
    words = [str(EXAMPLES / "script.py"), str(TINY), "fork", whole, str(tmp_path / "model"), *settings]
    continued = python(tmp_path, home, "-c", NOTEBOOK, *words)
    assert continued.code == 0, continued.err
    lines = continued.out.splitlines()
    assert lines[0].startswith("2 iterations, ")
    assert len(lines) == 1 + 3 + 3 + 1
    assert re.match(r"[01]\.\d\d \| \d+\+\d+= -> ", lines[4])
    assert lines[-1] == f"25 tensors of iteration 2 are in {tmp_path / 'model'}"
    assert (tmp_path / "model" / "config.json").exists()
    ours, theirs = (need(open_root(whole), run, 2, Stage.ROLLOUT) for run in (RUN, "fork"))
    # the same weights, prompts and seeds: the same samples; later steps differ
    columns = ["prompt_id", "response_tokens", "logprobs"]
    tables = [read_table(open_root(whole), manifest, ROLLOUT, columns) for manifest in (ours, theirs)]
    assert tables[0].equals(tables[1])
    ours, theirs = (need(open_root(whole), run, 2, Stage.TRAIN) for run in (RUN, "fork"))
    # the previous weights, which two other ranks have loaded, are those that the engine has sampled with
    assert theirs.metrics["engine_logprob_diff_max"] < 1e-3
    # two ranks do what one does, but for rounding and for the second step; before it the weights are 2 % apart
    for name in ("loss", "grad_norm", "entropy"):
        assert theirs.metrics[name] == pytest.approx(ours.metrics[name], rel=0.05, abs=1e-3), name
    assert (ours.facts["rng"], theirs.facts["rng"]) == ("continued", "reseeded")
    ours, theirs = (need(open_root(whole), run, 2, Stage.WEIGHT_SYNC) for run in (RUN, "fork"))
    assert theirs.metrics["probe_diff_max"] < 1e-3
    assert ours.facts["weights_digest"] != theirs.facts["weights_digest"]
