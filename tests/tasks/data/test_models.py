"""Place of a model, and the files that a run takes from it."""

import fsspec
import pytest
from botocore.exceptions import NoCredentialsError
from fsspec.spec import AbstractFileSystem
from huggingface_hub import constants

from storage.errors import InputError
from tasks.config.model import ModelSection
from tasks.config.others import KEYS
from tasks.data.hub import HubId, hub_id, is_hub_id
from tasks.data.models import ModelFolder, copy_files, count_parameters, fill_model_directory, find_model
from tasks.model_checks.fitness import check_weights
from tests.bad_input import models

TAKEN = {
    "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
}  # fmt: skip

WEIGHTS = [name for name in TAKEN if name.endswith(".safetensors")]


@pytest.fixture
def model(tmp_path):
    """A model with files that a run does not take."""
    made = models.make(tmp_path / "model")
    for name in ("consolidated.safetensors", "training_args.bin", "README.md"):
        (made / name).write_bytes(b"?")
    (made / "original").mkdir()
    return made


def taken(tmp_path, source):
    target = tmp_path / "taken"
    target.mkdir()
    return set(fill_model_directory(target, ModelSection(source=source), 0))


def test_the_weights_of_the_index_and_the_tokenizer_are_taken(model, tmp_path):
    assert taken(tmp_path, str(model)) == TAKEN


def test_a_model_at_a_url(model, tmp_path):
    fsspec.filesystem("memory").put(str(model), "/stored/model", recursive=True)
    section = ModelSection(source="memory://stored/model")
    folder = find_model(section)
    check_weights(folder, folder.document("config.json"))
    assert taken(tmp_path, section.source) == TAKEN


@pytest.mark.parametrize("source", ["org/name@v1", "hf://org/name@v1", "hf://models/org/name@v1/"])
def test_a_model_in_the_cache_of_the_hub(tmp_path, monkeypatch, source):
    models.in_hub_cache(tmp_path / "home", "org/name", "v1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    assert taken(tmp_path, source) == TAKEN
    only = tmp_path / "only"
    only.mkdir()
    assert copy_files(source, only, lambda name: name == "config.json") == ["config.json"]
    section = ModelSection(source=source)
    sizes = find_model(section).files()
    assert count_parameters(section, {"dtype": "float32"}) == sum(sizes[name] for name in WEIGHTS) // 4


def test_an_existing_folder_comes_before_the_hub(tmp_path, monkeypatch):
    models.make(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert taken(tmp_path, "org/name") == TAKEN
    with pytest.raises(InputError, match="there is no folder org/other"):
        find_model(ModelSection(source="org/other"))


@pytest.mark.parametrize(
    ("key", "source", "command"),
    [
        ("critic", "my-run@7", "my-run@7 --critic --to FOLDER"),
        ("judge", "s3://b/runs//rm@best", "rm@best --to FOLDER --root=s3://b/runs"),
        ("teacher", "runs//my-run@7", "my-run@7 --to FOLDER --root=runs"),
    ],
)
def test_a_stored_state_is_refused_with_the_command_that_makes_it_a_folder(key, source, command, monkeypatch):
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "exists", lambda *_: False)
    with pytest.raises(InputError, match=f"^{KEYS[key]} {source} names a stored state, .* `ratchet export {command}`"):
        find_model(ModelSection(source=source), KEYS[key])


def test_a_folder_that_is_called_as_a_state_is_a_folder(tmp_path, monkeypatch):
    models.make(tmp_path / "my-run@7")
    monkeypatch.chdir(tmp_path)
    assert taken(tmp_path, "my-run@7") == TAKEN


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("org/name", HubId("org/name")),
        ("org/name@refs/pr/7", HubId("org/name", "refs/pr/7")),
        ("hf://org/name", HubId("org/name")),
        ("hf://org/name@refs%2Fpr%2F7/sub/folder", HubId("org/name", "refs/pr/7", "sub/folder")),
    ],
)
def test_what_an_id_means(source, meant):
    assert hub_id(source) == meant


@pytest.mark.parametrize("source", ["name", "./org/name", "/org/name", "a/b/c", "../name", "~/name", "s3://org/name"])
def test_what_is_no_id(source):
    assert not is_hub_id(source)


class Closed(AbstractFileSystem):
    """A bucket that this user cannot enter."""

    protocol = "s3"

    def ls(self, path, detail=True, **_):
        raise NoCredentialsError


def test_a_bucket_that_gives_nothing_is_refused():
    with pytest.raises(InputError, match=r"s3://bucket/m: it cannot be read \(Unable to locate credentials\)"):
        ModelFolder("s3://bucket/m", Closed(), "bucket/m").files()
