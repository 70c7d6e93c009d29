"""The reference of the configuration agrees with the models, and its example is valid."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from storage.backends.root import open_root
from tasks.checks import check_config
from tasks.config import reference
from tasks.config.document import parse_config
from tasks.config.run import RunConfig

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"

LEAST = {
    "model": {"generate": {}},
    "data": {"generate": {}},
    "train": {"max_length": 128, "optimizer": {"learning_rate": 1e-5}},
}


def paths(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_the_page_is_current():
    assert PAGE.read_text() == reference.markdown(), "run: ratchet config --markdown > docs/configuration.md"


def test_it_has_every_key_and_says_which_may_change():
    asked = {
        "retrain": {"start": "run@1", "select": ["run"]},
        "environment": {"function": "mine:Game"},
        "engines": {"judge": {"source": "folder"}},
        "rollout": {"updates": "in-flight", "pause_tokens": 4, "open_prompts": 40, "max_staleness": 2},
    }
    of_mine = {"function": "mine:Engine", "source": "digest"}
    engines = (of_mine, {"precision": "bf16", "quantization": "fp8"}, {"adapter": "live"}, {})
    adapters = {
        "lora": {"rank": 4},
        "policy": {"distill": {"teacher": "folder", "top_k": 4}},
        "experts": {"replay": True},
    }
    critic = {"critic": {"learning_rate": 1e-3, "source": "folder"}, "policy": {"advantage": {"type": "gae"}}}
    trained = (adapters, critic, {"lora": {"rank": 4}}, {"precision": "bf16", "fp8": "tensorwise"})
    every = [
        parse_config({**LEAST, **asked, "engine": engine, "train": LEAST["train"] | one}, "test")
        for engine, one in zip(engines, trained, strict=True)
    ]
    keys = {key.path: key for table in reference.tables() for key in table.keys}
    of_advantage = {f"train.policy.advantage.{name}" for name in ("gamma", "gae_lambda", "normalize")}
    assert set(keys) | of_advantage == {path for one in every for path in paths(one.model_dump(mode="json"))}
    fixed = {path for path, key in keys.items() if key.role == reference.MEANING}
    assert fixed | of_advantage == {path for one in every for path in paths(one.meaning())}
    assert all(key.text for key in keys.values())


def test_the_example_is_a_configuration_with_every_default(tmp_path):
    config = parse_config(tomllib.loads(reference.example()), "test")
    assert config == parse_config(LEAST, "test")
    check_config(config, open_root(str(tmp_path)))
    there = {line.partition(" = ")[0].removeprefix("# ") for line in reference.example().splitlines()}
    assert {path.rpartition(".")[2] for path in paths(config.model_dump(mode="json", exclude={"retrain"}))} <= there
    assert {"start", "since", "epochs"} <= there


def test_defaults_and_limits_are_those_of_the_models():
    keys = {key.path: key for table in reference.tables() for key in table.keys}
    shown = {path: (keys[path].kind, reference.default_of(keys[path])) for path in keys}
    assert shown["train.optimizer.learning_rate"] == ("number, at least 0", "required")
    assert shown["warmup.optimizer.learning_rate"] == ("number, at least 0", "0.001")
    assert shown["train.policy.clip_low"] == ("number, at least 0, below 1", "0.2")
    assert shown["device.kind"] == ('"cpu" or "cuda" or "auto"', '"auto"')
    assert shown["storage.keep_newest"] == ("whole number, at least 1", "not set")
    assert shown["reward.arguments"] == ("table", "{}")


def test_a_table_with_a_type_shows_all_its_forms():
    tables = {table.path: table for table in reference.tables()}
    loss = tables["train.policy.loss"]
    assert loss.tag == '"clip"'
    assert [other.tag for other in loss.instead] == [
        '"gspo"',
        '"cispo"',
        '"sft"',
        '"dpo"',
        '"reward_model"',
        '"custom"',
    ]
    assert [key.name for key in loss.instead[-3].keys] == ["type", "beta", "label_smoothing", "pairs"]
    assert all(key.text and key.role == reference.MEANING for other in loss.instead for key in other.keys)
    assert next(key.kind for key in loss.keys if key.name == "type").count(" or ") == 6
    assert '### `[train.policy.loss]` with `type = "dpo"`' in reference.markdown()
    assert '# With type = "sft": above = 0.0, best = false.' in reference.example()


def test_the_schema_describes_every_key():
    schema = RunConfig.model_json_schema()
    assert json.loads(reference.schema().model_dump_json()) == schema
    described = [
        (name, key, field.get("description"))
        for name, section in schema["$defs"].items()
        for key, field in section.get("properties", {}).items()
        if "$ref" not in field and "$ref" not in json.dumps(field.get("anyOf", ""))
    ]
    assert len(described) > 60
    assert not [place for *place, text in described if not text]
