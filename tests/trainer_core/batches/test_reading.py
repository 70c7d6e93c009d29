from datetime import UTC, datetime

import pyarrow as pa
import pytest

from storage.backends.root import open_root
from storage.errors import StageFailed
from storage.manifest import Manifest
from storage.parts import PartWriter
from storage.schema import REWARD, ROLLOUT
from tasks.stages.names import Stage
from trainer_core.batches.reading import read_samples

# (prompt id, sample id, prompt tokens, response tokens)
SAMPLES = [("b", 0, [1, 2], [3]), ("b", 1, [1, 2], [4, 5]), ("a", 0, [6], [7, 8, 9]), ("a", 1, [6], [])]
REWARDS = {("a", 1): 0.0, ("a", 0): 0.5, ("b", 1): None, ("b", 0): 1.0}  # in another order


@pytest.fixture
def root(tmp_path):
    return open_root(f"file://{tmp_path}")


def store(root, stage, schema, *tables):
    writer = PartWriter(root, "run", 1, stage)
    parts = [
        writer.write_table(f"{stage}-{number}.arrow", pa.Table.from_pylist(rows, schema), schema)
        for number, rows in enumerate(tables)
    ]
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return Manifest(
        run="run", iteration=1, stage=stage, parts=tuple(parts), config_digest="", code_version="", started=moment,
        finished=moment,
    )  # fmt: skip


def rollout_row(prompt_id, sample_id, prompt, response):
    return {
        "run": "run", "iteration": 1, "prompt_id": prompt_id, "sample_id": sample_id, "prompt_tokens": prompt,
        "response_tokens": response, "logprobs": [-float(token) for token in response], "finish_reason": "stop",
        "weight_version": 0, "seed": 1, "temperature": 1.0, "top_p": 1.0, "max_tokens": 4,
    }  # fmt: skip


def reward_row(key, reward):
    status = "ok" if reward is not None else "error"
    return {"prompt_id": key[0], "sample_id": key[1], "reward": reward, "status": status, "detail": ""}


def rollouts(root):
    rows = [rollout_row(*sample) for sample in SAMPLES]
    return store(root, Stage.ROLLOUT, ROLLOUT, rows[:1], rows[1:])  # two parts


def test_rollouts_and_rewards_are_joined_by_sample(root):
    rewards = store(root, Stage.REWARD, REWARD, [reward_row(*item) for item in REWARDS.items()])
    samples = read_samples(root, rollouts(root), rewards)
    assert samples.tokens.tolist() == [1, 2, 3, 1, 2, 4, 5, 6, 7, 8, 9, 6]
    assert samples.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert samples.response_lengths.tolist() == [1, 2, 3, 0]
    assert samples.engine_logprobs.tolist() == [-3, -4, -5, -7, -8, -9]
    assert samples.rewards.tolist() == [1.0, 0.0, 0.5, 0.0]
    assert samples.groups[0] == samples.groups[1] != samples.groups[2] == samples.groups[3]


def test_without_reward_or_response_a_sample_is_not_usable(root):
    rewards = store(root, Stage.REWARD, REWARD, [reward_row(*item) for item in REWARDS.items()])
    assert read_samples(root, rollouts(root), rewards).usable.tolist() == [True, False, True, False]


def test_a_sample_without_reward_row_is_named(root):
    rewards = store(root, Stage.REWARD, REWARD, [reward_row(*item) for item in list(REWARDS.items())[:3]])
    with pytest.raises(StageFailed, match=r"1 samples have no reward row, first \('b', 0\)"):
        read_samples(root, rollouts(root), rewards)
