"""The forms of a source of prompts, and the part of them that is a run's meaning."""

import pytest

from storage.errors import InputError
from tasks.config.document import load_config, parse_config
from tasks.config.identity import meaning_digest
from tasks.config.stored import ConfigRecord

BASE = {"model": {"generate": {}}, "train": {"max_length": 128, "optimizer": {"learning_rate": 1e-3}}}


def config_of(**data):
    return parse_config({**BASE, "data": data}, "test")


def sources(**data):
    return [(one.source, one.weight) for one in config_of(**data).data.sources("train")]


def test_a_source_is_a_text_a_table_or_a_list():
    assert sources(train="a") == [("a", None)]
    assert sources(train=["a", "b"]) == [("a", None), ("b", None)]
    assert sources(train={"source": "a", "weight": 2}) == [("a", 2)]
    assert sources(train=["a", {"source": "b", "weight": 0.5}]) == [("a", None), ("b", 0.5)]


def test_what_a_source_leaves_open_is_as_for_all():
    first, second = config_of(
        train=["a", {"source": "b", "prompt_field": "q", "system": "Other."}], prompt="{x}", system="Add.", chat=True
    ).data.sources("train")
    assert (first.prompt, first.prompt_field, first.system, first.chat) == ("{x}", "prompt", "Add.", True)
    assert (second.prompt, second.prompt_field, second.system, second.chat) == (None, "q", "Other.", True)


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        ({"train": 5}, "data.train: 5 names no source"),
        ({"train": [{"weight": 2}]}, "data.train.0.source: this key is required"),
        ({"train": [{"source": "a", "weigth": 2}]}, "did you mean 'data.train.0.weight'"),
        ({"train": [{"source": "", "weight": 2}]}, "source is empty"),
        ({"train": [{"source": "a", "name": "x/y"}]}, "name 'x/y' goes before prompt ids"),
        ({"train": "a", "prompt": "{a.b!r}"}, "put the name of a field in braces"),
        ({"train": "a", "hold_out": -1}, "data.hold_out"),
        ({"generate": {}, "hold_out": 5}, "data.hold_out = 5 and data.generate.held_out exclude each other"),
        ({"train": "a", "overlong": "cut"}, "data.overlong"),
        ({"train": [{"source": "s3://key:s3cret@bucket/a"}]}, "is a URL with credentials"),
    ],
)
def test_what_cannot_be_a_source_is_refused(data, fact):
    with pytest.raises(InputError) as caught:
        config_of(**data)
    assert fact in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_files_of_a_list_are_found_beside_the_configuration(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    for name in ("a.jsonl", "part-1.jsonl"):
        (tmp_path / "there" / name).write_text("{}")
    (tmp_path / "there" / "run.toml").write_text(
        "[model.generate]\n[train]\nmax_length = 128\n[train.optimizer]\nlearning_rate = 1e-3\n"
        '[data]\ntrain = ["a.jsonl", "env:NAME", "org/words"]\n[[data.held_out]]\nsource = "part-*.jsonl"\n'
    )
    monkeypatch.chdir(tmp_path)
    data = load_config("there/run.toml").data
    beside = tmp_path / "there"
    assert [one.source for one in data.sources("train")] == [str(beside / "a.jsonl"), "env:NAME", "org/words"]
    assert data.sources("held_out")[0].source == str(beside / "part-*.jsonl")


@pytest.mark.parametrize("key", ["source", "split", "subset", "format"])
def test_where_the_content_of_a_source_is_may_change(key):
    here, there = {"source": "a", "weight": 2}, {"source": "a", "weight": 2, key: "csv"}
    assert config_of(train=[here]).meaning() == config_of(train=[there]).meaning()


@pytest.mark.parametrize(
    ("key", "value"), [("weight", 3.0), ("name", "n"), ("prompt_field", "q"), ("prompt", "{q}"), ("system", "Add.")]
)
def test_what_a_source_gives_may_not_change(key, value):
    here, there = {"source": "a", "weight": 2}, {"source": "a", "weight": 2, key: value}
    assert config_of(train=[here]).meaning() != config_of(train=[there]).meaning()


def test_a_bare_source_is_no_part_of_the_identity():
    stored = {"data": {"train": "a", "held_out": None, "id_field": "id"}}
    assert meaning_digest(stored) == meaning_digest({"data": {"id_field": "id"}})


def test_without_held_out_prompts_nothing_is_evaluated():
    assert config_of(train="a").evaluate.every == 0
    assert config_of(train="a", hold_out=1).evaluate.every == 1
    assert config_of(train="a", held_out="b").evaluate.every == 1
    assert config_of(generate={}).evaluate.every == 1
    asked = parse_config({**BASE, "data": {"train": "a"}, "evaluate": {"every": 1}}, "test")
    assert asked.evaluate.every == 1  # the checks refuse it


def test_a_record_of_it_is_read_as_it_was_written():
    config = config_of(train=["a", {"source": "b", "weight": 2}], hold_out=3)
    record = ConfigRecord.of(config)
    assert ConfigRecord.model_validate_json(record.model_dump_json()) == record
