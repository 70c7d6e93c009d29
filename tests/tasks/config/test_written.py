"""A configuration as TOML text reads back as the same configuration."""

import tomllib
from pathlib import Path

import pytest

from tasks.config import reference
from tasks.config.document import load_config, parse_config, written
from tasks.config.run import RunConfig
from tests.small.config import small_config

EXAMPLES = Path(__file__).resolve().parents[3] / "infra" / "examples"


def again(config: RunConfig) -> RunConfig:
    text = "\n".join(written(config.model_dump(mode="json")))
    return parse_config(tomllib.loads(text), "printed")


@pytest.mark.parametrize("name", ["demo.toml", "gpu.toml"])
def test_an_example_reads_back(name):
    config = load_config(str(EXAMPLES / name))
    assert again(config) == config


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["run.name=a", 'rollout.stop_tokens=["=", 1, "\\n", "\\u007f", "\\u2028"]'],
        ['reward.arguments={pattern="^\\\\d+\\t\\"$", "a key" = [1, 2.5, {b = true}], "" = "é😀"}'],
        ['reward={functions=[{name="a", function="regex", weight=1e-7, arguments={pattern="x"}}]}'],
        ['data={train=[{source="/a.jsonl", weight=3.0}, {source="/b c.csv", subset="x"}], hold_out=2}'],
        ["train.optimizer.learning_rate=1e22", "train.policy.correction.type=mask", "run.seed=2147483647"],
        ['retrain={start="a@1", select=["b", "s3://c/d//e@1-2"], where="reward > 0", since=2026-01-02T03:04:05Z}'],
    ],
    ids=["small", "texts", "free", "functions", "sources", "numbers", "retrain"],
)
def test_what_can_be_set_reads_back(settings):
    config = small_config(settings)
    assert again(config) == config


def test_every_default_reads_back():
    document = tomllib.loads(reference.example())
    assert tomllib.loads("\n".join(written(document))) == document


def test_what_has_no_value_is_left_out_and_tables_follow_their_own_keys():
    document = {"a": {"none": None, "inner": {"x": 1}, "empty": {}, "y": 2.0}, "b": {"none": None}}
    assert list(written(document)) == ["[a]", "empty = {}", "y = 2.0", "", "[a.inner]", "x = 1", ""]
