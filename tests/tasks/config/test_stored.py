"""A run keeps the configuration it was started with, and the identity that follows from its record."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import DigestMismatch, InputError, SchemaMismatch
from storage.upkeep.verify import Problem, verify
from tasks.config.document import apply_override, load_config, parse_config
from tasks.config.identity import RULES, meaning_digest
from tasks.config.run import RunConfig
from tasks.config.stored import read_config, record_config, stored_config
from tests.tasks.config.test_run import MINIMAL

KEY = layout.run_config_key("run")
RECORDS = Path(__file__).resolve().parent / "records"
PROJECT = Path(__file__).resolve().parents[3]
FIRST_RULES = {
    "demo": ("infra/examples/demo.toml", "add52c313b1b7e5fc5d12e3c2cefb972"),
    "tiny": ("tests/integration/tiny.toml", "925adebc100c1492190b212ad0df8576"),
}
"""What the last version without a number of rules computed for these files; it wrote the records next to this test."""


@pytest.fixture
def config() -> RunConfig:
    return parse_config({**tomllib.loads(MINIMAL), "run": {"name": "run"}}, "test")


@pytest.fixture
def root(tmp_path) -> Root:
    return open_root(str(tmp_path / "runs"))


def test_it_reads_back_equal(root, config):
    record_config(root, "run", config)
    assert stored_config(root, "run") == config
    record_config(root, "run", config)


def test_another_meaning_is_refused(root, config):
    record_config(root, "run", config)
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"samples": 3})})
    with pytest.raises(InputError, match=r"rollout\.samples: the run was started with 8, but is now given 3"):
        record_config(root, "run", other)
    assert stored_config(root, "run") == config


def test_an_unknown_run(root):
    with pytest.raises(InputError, match="there is no run 'never'"):
        stored_config(root, "never")


def test_each_flipped_bit_is_refused_with_the_key(config):
    root = open_root("memory://flipped", allow_memory=True)
    record_config(root, "run", config)
    good = root.read_bytes(KEY)
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 1 << position % 8
        root.replace(KEY, bytes(damaged))
        with pytest.raises(DigestMismatch, match=KEY):
            stored_config(root, "run")
        assert [(one.fault, one.key) for one in verify(root, "run").findings] == [(Problem.DAMAGED, KEY)]


def test_a_record_of_an_earlier_version_is_read(root, config):
    document = config.model_dump(mode="json", exclude={"storage"})  # from before there was retention, and unsealed
    root.put_if_absent(KEY, json.dumps(document, indent=1).encode())
    assert stored_config(root, "run") == config
    record_config(root, "run", config)


def test_a_record_that_this_version_cannot_read_is_refused(root, config):
    document = {**config.model_dump(mode="json"), "later": 1}
    root.put_if_absent(KEY, json.dumps(document).encode())
    with pytest.raises(SchemaMismatch, match="later"):
        stored_config(root, "run")


def put_record(root: Root, document: dict[str, Any]) -> None:
    root.put_if_absent(KEY, json.dumps(document, indent=1).encode())


def with_settings(config: RunConfig, *settings: str) -> RunConfig:
    document = config.model_dump(mode="json", exclude_none=True)
    for setting in settings:
        apply_override(document, setting)
    return parse_config(document, "test")


@pytest.mark.parametrize("name", FIRST_RULES)
def test_a_run_of_the_first_rules_keeps_its_digest(root, name):
    file, digest = FIRST_RULES[name]
    root.put_if_absent(KEY, (RECORDS / f"{name}.json").read_bytes())
    assert read_config(root, "run").digest == digest
    config = load_config(str(PROJECT / file))
    assert record_config(root, "run", config) == digest
    for setting in ("sync.max_mean_difference=1", "sync.max_difference=2", "sync.probe_sequences=3"):
        assert record_config(root, "run", with_settings(config, setting)) == digest


def test_the_digest_of_a_new_run_is_that_of_its_record(root, config):
    odd = ["reward.arguments.scale=1", "reward.arguments.weights=[1.0, 1e-30, 1e22]", "train.optimizer.eps=1e-300"]
    given = with_settings(config, *odd, "train.optimizer.learning_rate=1", 'reward.arguments.text="ü\\n"')
    digest = record_config(root, "run", given)
    assert json.loads(root.read_bytes(KEY))["rules"] == RULES == 3
    assert read_config(root, "run").digest == digest
    assert record_config(root, "run", given) == digest


@pytest.mark.parametrize("rules", [{}, {"rules": 2}, {"rules": 3}], ids=["first", "second", "third"])
@pytest.mark.parametrize(
    ("section", "key", "default", "other"),
    [("policy", "loss_aggregation", "token", "sequence"), ("optimizer", "beta2", 0.95, 0.99)],
)
def test_a_key_that_is_newer_than_the_record(root, config, rules, section, key, default, other):
    document = {**config.model_dump(mode="json"), **rules}
    del document["train"][section][key]  # as if this version had introduced it
    put_record(root, document)
    document.pop("rules", None)
    digest = read_config(root, "run").digest
    assert digest == meaning_digest(document, rules.get("rules", 1))
    assert record_config(root, "run", config) == digest
    with pytest.raises(InputError, match=rf"train\.{section}\.{key}: .* with {default!r}, but is now given {other!r}"):
        record_config(root, "run", with_settings(config, f"train.{section}.{key}={other}"))
    assert record_config(root, "run", config) == digest


@pytest.mark.parametrize("rules", [4, 0, "2", None])
def test_rules_that_this_version_does_not_know_are_refused(root, config, rules):
    put_record(root, {**config.model_dump(mode="json"), "rules": rules})
    with pytest.raises(SchemaMismatch, match=rf"under rules {rules!r} .* knows 1 to 3"):
        stored_config(root, "run")


@pytest.mark.parametrize("text", [b"{", b"[1]"])
def test_a_record_that_is_no_configuration_is_refused(root, text):
    root.put_if_absent(KEY, text)
    with pytest.raises(SchemaMismatch, match=KEY):
        stored_config(root, "run")


SECRET = "sk-7d1f-very-secret"


@pytest.fixture
def with_secrets(root, config) -> str:
    """A run that an earlier version recorded with literal secrets; returns its digest."""
    document = config.model_dump(mode="json")
    document["reward"]["arguments"] = {
        "api_key": SECRET,
        "headers": {"Authorization": f"Bearer {SECRET}"},
        "endpoints": [f"https://judge:{SECRET}@host/score", "https://host/plain"],
        "threshold": 0.5,
    }
    document["data"] = {**document["data"], "generate": None, "train": f"https://host/a.jsonl?sig={SECRET}"}
    put_record(root, document)
    return meaning_digest(document, 1)


def by_reference(config: RunConfig, *settings: str) -> RunConfig:
    given = {
        "reward": {
            "arguments": {
                "api_key": "env:JUDGE_KEY",
                "headers": {"Authorization": "env:JUDGE_BEARER"},
                "endpoints": ["env:JUDGE_URL", "https://host/plain"],
                "threshold": 0.5,
            }
        },
        "data": {"train": "/data/a.jsonl"},
    }
    document = {**config.model_dump(mode="json", exclude_none=True), **given}
    for setting in settings:
        apply_override(document, setting)
    return parse_config(document, "test")


def test_a_recorded_secret_is_masked_and_its_run_is_continued_by_reference(root, config, with_secrets):
    stored = stored_config(root, "run")
    assert SECRET not in stored.model_dump_json()
    assert stored.reward.arguments["threshold"] == 0.5
    assert record_config(root, "run", by_reference(config)) == with_secrets
    with pytest.raises(InputError, match=r"threshold: the run was started with 0\.5, but is now given 0\.7") as refused:
        record_config(root, "run", by_reference(config, "reward.arguments.threshold=0.7"))
    assert SECRET not in str(refused.value)


def test_a_secret_may_come_from_another_variable(root, config):
    digest = record_config(root, "run", by_reference(config))
    for setting in ("reward.arguments.api_key=env:OTHER", "reward.arguments.headers.X-Api-Key=env:MORE"):
        assert record_config(root, "run", by_reference(config, setting)) == digest
    with pytest.raises(InputError, match="env:JUDGE_URL"):
        record_config(
            root, "run", by_reference(config, 'reward.arguments.endpoints=["env:OTHER", "https://host/plain"]')
        )


def test_another_endpoint_is_refused_without_showing_the_recorded_one(root, config, with_secrets):
    with pytest.raises(InputError, match="endpoints: the run was started with") as refused:
        record_config(
            root, "run", by_reference(config, 'reward.arguments.endpoints=["https://other", "https://host/plain"]')
        )
    assert SECRET not in str(refused.value)


def test_a_record_that_cannot_be_read_is_refused_without_its_secrets(root, config, with_secrets):
    document = json.loads(root.read_bytes(KEY))
    document["reward"]["argument"] = document["reward"].pop("arguments")
    root.replace(KEY, json.dumps(document).encode())
    with pytest.raises(SchemaMismatch, match=r"reward\.argument") as refused:
        stored_config(root, "run")
    assert SECRET not in str(refused.value)
