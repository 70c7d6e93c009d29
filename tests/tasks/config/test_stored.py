"""A run keeps its first configuration, and the identity that follows from its record."""

import json
import tomllib
from typing import Any

import pytest
from pydantic import RootModel

from storage import layout, records
from storage.backends.root import Root, open_root
from storage.errors import DigestMismatch, InputError, SchemaMismatch
from storage.upkeep.verify import Problem, verify
from tasks.config.document import apply_override, parse_config
from tasks.config.identity import meaning_digest
from tasks.config.run import RunConfig
from tasks.config.stored import RULES, read_config, record_config, stored_config
from tests.storage.conftest import EXAMPLE
from tests.tasks.config.test_run import MINIMAL

KEY = layout.run_config_key("run")


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


@pytest.mark.slow
def test_each_flipped_bit_is_refused_with_the_key(config, tmp_path):
    """Of every third byte one bit, each of the eight in turn."""
    root = open_root(f"{EXAMPLE}://{tmp_path}/flipped.db")
    record_config(root, "run", config)
    good = root.read_bytes(KEY)
    for position in range(0, len(good), 3):
        damaged = bytearray(good)
        damaged[position] ^= 1 << position % 8
        root.replace(KEY, bytes(damaged))
        with pytest.raises(DigestMismatch, match=KEY):
            stored_config(root, "run")
        if position % 33 == 0:  # it reads the record in the same way, and the whole run besides
            assert [(one.fault, one.key) for one in verify(root, "run").findings] == [(Problem.DAMAGED, KEY)]


def put_record(root: Root, document: dict[str, Any]) -> None:
    root.put_if_absent(KEY, records.seal(RootModel(document), KEY))


def test_a_record_that_this_version_cannot_read_is_refused(root, config):
    put_record(root, {**config.model_dump(mode="json"), "rules": 1, "later": 1})
    with pytest.raises(SchemaMismatch, match="later"):
        stored_config(root, "run")


def with_settings(config: RunConfig, *settings: str) -> RunConfig:
    document = config.model_dump(mode="json", exclude_none=True)
    for setting in settings:
        apply_override(document, setting)
    return parse_config(document, "test")


def test_the_digest_of_a_new_run_is_that_of_its_record(root, config):
    odd = ["reward.arguments.scale=1", "reward.arguments.weights=[1.0, 1e-30, 1e22]", "train.optimizer.eps=1e-300"]
    given = with_settings(config, *odd, "train.optimizer.learning_rate=1", 'reward.arguments.text="ü\\n"')
    digest = record_config(root, "run", given)
    assert json.loads(root.read_bytes(KEY))["rules"] == RULES == 1
    assert read_config(root, "run").digest == digest
    assert record_config(root, "run", given) == digest


@pytest.mark.parametrize(
    ("section", "key", "default", "other"),
    [("policy", "loss_aggregation", "token", "sequence"), ("optimizer", "beta2", 0.95, 0.99)],
)
def test_a_key_that_is_newer_than_the_record(root, config, section, key, default, other):
    document = {**config.model_dump(mode="json"), "rules": RULES}
    del document["train"][section][key]  # as if this version had introduced it
    put_record(root, document)
    digest = read_config(root, "run").digest
    assert digest == meaning_digest({name: value for name, value in document.items() if name != "rules"})
    assert record_config(root, "run", config) == digest
    with pytest.raises(InputError, match=rf"train\.{section}\.{key}: .* with {default!r}, but is now given {other!r}"):
        record_config(root, "run", with_settings(config, f"train.{section}.{key}={other}"))
    assert record_config(root, "run", config) == digest


@pytest.mark.parametrize("rules", [2, 0, "1", None])
def test_rules_that_this_version_does_not_know_are_refused(root, config, rules):
    put_record(root, {**config.model_dump(mode="json"), "rules": rules})
    with pytest.raises(SchemaMismatch, match=rf"under rules {rules!r} .* knows 1"):
        stored_config(root, "run")


@pytest.mark.parametrize("text", [b"{", b"[1]"])
def test_a_record_that_is_none_is_refused(root, text):
    root.put_if_absent(KEY, text)
    with pytest.raises(DigestMismatch, match=KEY):
        stored_config(root, "run")


SECRET = "sk-7d1f-very-secret"


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


def test_a_secret_may_come_from_another_variable(root, config):
    digest = record_config(root, "run", by_reference(config))
    for setting in ("reward.arguments.api_key=env:OTHER", "reward.arguments.headers.X-Api-Key=env:MORE"):
        assert record_config(root, "run", by_reference(config, setting)) == digest
    with pytest.raises(InputError, match="env:JUDGE_URL"):
        record_config(
            root, "run", by_reference(config, 'reward.arguments.endpoints=["env:OTHER", "https://host/plain"]')
        )


def test_a_record_that_cannot_be_read_is_refused_without_its_secrets(root, config):
    document = {**config.model_dump(mode="json"), "rules": RULES}
    document["reward"]["argument"] = {"api_key": SECRET}
    put_record(root, document)
    with pytest.raises(SchemaMismatch, match=r"reward\.argument") as refused:
        stored_config(root, "run")
    assert SECRET not in str(refused.value)
