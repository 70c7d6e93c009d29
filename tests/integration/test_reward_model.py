"""A reward model over the real stack: trained on stored samples, exported, and the reward of a run that is killed."""

import numpy as np
import pytest

from storage.backends.root import open_root
from storage.manifest import need
from storage.parts import read_table, row_views
from storage.schema import REWARD, ROLLOUT
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tests.integration.command import RUN, TINY, prove, ratchet, run_tiny
from tests.trainer_core.ranks import run_ranks

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

KILLS = ["reward@2:started:judge-0", "reward@2:parts-done:flow"]
LEARN = [
    "--config", "infra/examples/reward_model.toml", "--set", "retrain.samples=128", "--set", "run.iterations=2",
    "--set", "train.policy.kl_coefficient=0",
]  # fmt: skip


def values_of(rank, world_size, store, directory, rows):
    """Values by transformers' own class."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        return [model(torch.from_numpy(row.astype(np.int64))[None]).logits[0, 0].item() for row in rows]


def read(root, number, stage, schema):
    return read_table(root, need(root, RUN, number, stage), schema)


def test_its_values_are_the_rewards_of_a_run_that_is_killed(home, tmp_path):
    root, folder = tmp_path / "runs", tmp_path / "scores"
    assert run_tiny(root, home, "--set", "run.iterations=1").code == 0
    learnt = ratchet("retrain", "learnt", "--from", f"{RUN}@0", "--select", RUN, *LEARN, "--root", str(root), home=home)
    assert learnt.code == 0, learnt.err
    made = ratchet("export", "learnt", "--to", str(folder), "--root", str(root), home=home)
    assert made.code == 0, made.err
    settings = (
        f'engines.judge.source="{folder}"', "engines.judge.max_model_len=16", 'reward.function="reward_model"',
        "rollout.prompts=8",
    )  # fmt: skip
    done = prove(TINY, str(tmp_path / "proof"), 2, KILLS, settings, home)
    assert done.code == 0, done.err + done.out
    assert (done.json["points"], done.json["orphans"]) == (KILLS, [])
    whole, interrupted = (open_root(str(tmp_path / "proof" / name)) for name in ("whole", "interrupted"))
    for number in (1, 2):
        rewards = read(whole, number, Stage.REWARD, REWARD)["reward"]
        assert read(interrupted, number, Stage.REWARD, REWARD)["reward"].equals(rewards)
        rollout = read(whole, number, Stage.ROLLOUT, ROLLOUT)
        pairs = zip(*(row_views(rollout[name]) for name in ("prompt_tokens", "response_tokens")), strict=True)
        (wanted,) = run_ranks(1, values_of, str(folder), [np.concatenate(pair) for pair in pairs])
        np.testing.assert_allclose(rewards.to_numpy(), wanted, rtol=0, atol=1e-5)
        assert np.ptp(wanted) > 0.1
    assert verify(interrupted, RUN).sound
    again = ["reward", f"{RUN}@2", "--root", str(tmp_path / "proof/interrupted"), "--json"]
    assert ratchet(*again, home=home).json["changed"] == 0
