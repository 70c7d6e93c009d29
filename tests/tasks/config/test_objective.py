"""The source of an objective of the user's own is part of a run's meaning; the place of its file is not."""

import shutil

import pytest

from storage.backends.root import open_root
from storage.errors import InputError
from tasks.config.document import load_config
from tasks.config.identity import meaning_digest
from tasks.config.stored import forked_config, record_config
from tests.tasks.config.test_run import MINIMAL

TABLE = """
[train.policy.loss]
type = "custom"
function = "mine.py:loss"
"""
SOURCE = "def loss(tokens): return -tokens.advantages * tokens.logprobs"


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "run.toml").write_text(MINIMAL + TABLE)
    (home / "mine.py").write_text(SOURCE)
    return home


def digest(config):
    return meaning_digest(config.model_dump(mode="json"))


def test_a_configuration_holds_the_digest_of_the_source(folder, tmp_path):
    config = load_config(str(folder / "run.toml"))
    assert config.train.policy.loss.function == f"{folder}/mine.py:loss"
    assert len(config.train.policy.loss.source) == 32
    shutil.copytree(folder, tmp_path / "elsewhere")
    elsewhere = load_config(str(tmp_path / "elsewhere" / "run.toml"))
    assert elsewhere != config
    assert digest(elsewhere) == digest(config)
    (folder / "mine.py").write_text(f"{SOURCE} * 2")
    assert digest(load_config(str(folder / "run.toml"))) != digest(config)


def test_a_run_is_not_continued_with_a_changed_source(folder, tmp_path):
    root = open_root(str(tmp_path / "runs"))
    config = load_config(str(folder / "run.toml"))
    record_config(root, "run", config)
    (folder / "mine.py").write_text(f"{SOURCE} * 2")
    changed = load_config(str(folder / "run.toml"))
    with pytest.raises(InputError, match=r"train\.policy\.loss\.source: the run was started with"):
        record_config(root, "run", changed)
    with pytest.raises(InputError, match=r"'mine.py:loss' has changed: .*--set train.policy.loss.source="):
        forked_config(root, "run", "fork", [])
    fork = forked_config(root, "run", "fork", ["train.policy.loss.source="])
    assert fork.train.policy.loss == changed.train.policy.loss
    (folder / "mine.py").write_text(SOURCE)
    assert forked_config(root, "run", "fork", []).train.policy.loss == config.train.policy.loss


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("train.policy.loss.function=none.py:loss", r"train.policy.loss.function 'none.py:loss': there is no file"),
        ("train.policy.loss.function=mine.py", r"names no function in the file: give mine.py:FUNCTION"),
        ("train.policy.loss.function=mine", r"'mine' is unknown: installed are"),
        ("train.policy.loss.function=none.such:loss", r"there is no module none. Install it"),
        ("train.policy.loss.source=01", r"'mine.py:loss' has changed: the digest of its source is"),
        ("train.policy.clip_low=0.1", r"clip_low has no effect with loss.type = \"custom\""),
        ("train.policy.loss.needs=['rewards']", r"train.policy.loss.needs.0: Input should be 'advantages'"),
    ],
)
def test_what_cannot_be_used_is_refused_without_torch(folder, setting, expected):
    with pytest.raises(InputError, match=expected):
        load_config(str(folder / "run.toml"), [setting])
