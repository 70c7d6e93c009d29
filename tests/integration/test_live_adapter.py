"""A live adapter whose updates come within responses: each token is of the adapter that its row names."""

import numpy as np
import pytest

from storage.backends.root import open_root
from storage.manifest import need
from storage.parts import read_table
from storage.schema import ROLLOUT
from tasks.stages.names import Stage
from tests.integration.command import RUN, ratchet, run_tiny
from tests.integration.conftest import LIVE
from tests.trainer_core.ranks import run_ranks

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

IN_FLIGHT = (
    "rollout.ahead=1", 'rollout.updates="in-flight"', "rollout.prompts=8", "rollout.samples=2", "rollout.max_tokens=48",
    "rollout.pause_tokens=6", 'train.policy.old_policy="behaviour"', "train.optimizer.learning_rate=3e-2",
    "train.max_length=64", "engine.max_model_len=64", "run.iterations=4", "warmup.steps=1",
    "rollout.stop_tokens=[30,31]",  # lengths are about geometric
)  # fmt: skip


def logprobs_by(rank, world_size, store, directory, prompts, responses):
    """Log-probabilities of the tokens of responses by transformers in float32, one response after another."""
    import torch
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            likely = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        found.append(likely[len(prompt) - 1 : -1].gather(-1, torch.tensor(response)[:, None])[:, 0].numpy())
    return np.concatenate(found)


def test_each_token_is_of_the_adapter_that_its_row_names(home, tmp_path):
    settings = [word for setting in (*LIVE, *IN_FLIGHT) for word in ("--set", setting)]
    done = run_tiny(tmp_path, home, *settings)
    assert done.code == 0, done.err
    root = open_root(str(tmp_path))
    table = read_table(root, need(root, RUN, 4, Stage.ROLLOUT), ROLLOUT)
    prompts, responses = (table[name].to_pylist() for name in ("prompt_tokens", "response_tokens"))
    logprobs, versions = (table[name].combine_chunks().flatten().to_numpy() for name in ("logprobs", "weight_version"))
    known = np.unique(versions)
    apart = []
    for version in known:
        folder = str(tmp_path / f"export-{version}")
        exported = ratchet("export", f"{RUN}@{version}", "--to", folder, "--root", str(tmp_path), home=home)
        assert exported.code == 0, exported.err
        apart.append(np.abs(run_ranks(1, logprobs_by, folder, prompts, responses)[0] - logprobs))
    found, rows = np.stack(apart), np.searchsorted(known, versions)[None]
    own = np.take_along_axis(found, rows, axis=0)[0]
    others = (found.sum(axis=0) - own) / (len(known) - 1)
    mixed = sum(len(set(one)) > 1 for one in table["weight_version"].to_pylist())
    assert mixed >= 2
    assert own.max() < 1e-4
    assert others.mean() > 100 * own.mean()
    assert (known[found.argmin(axis=0)] == versions).mean() > 0.99
