"""Files named in a configuration are found beside it, then in the working directory, by absolute paths."""

from pathlib import Path

import pytest

from tasks.config.document import load_config, located
from tests.bad_input.test_command import CONFIG


@pytest.fixture
def places(tmp_path, monkeypatch):
    for name in ("there/both.jsonl", "there/one.jsonl", "here/both.jsonl", "here/other.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("both.jsonl", "there/both.jsonl"),
        ("one.jsonl", "there/one.jsonl"),
        ("other.jsonl", "here/other.jsonl"),
        ("*.jsonl", "there/*.jsonl"),
    ],
)
def test_beside_the_configuration_comes_first(places, name, found):
    assert located(name, places / "there") == str(places / found)


@pytest.mark.parametrize("name", ["org/name", "s3://bucket/data.jsonl", "env:DATA", "missing.jsonl"])
def test_what_is_no_local_file_is_left_alone(places, name):
    assert located(name, places / "there") == name


def test_a_configuration_means_the_same_from_every_folder(places, monkeypatch):
    document = CONFIG.replace("[data.generate]", '[data]\ntrain = "one.jsonl"')
    (places / "there" / "run.toml").write_text(document)
    from_here = load_config(str(places / "there" / "run.toml"))
    monkeypatch.chdir(places / "there")
    assert load_config("run.toml") == from_here
    assert from_here.data.train == str(Path(places / "there" / "one.jsonl"))
