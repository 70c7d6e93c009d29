"""A reward function in a file: its place, and that moving it begins no other run."""

import shutil
from pathlib import Path

import pytest

from storage.backends.root import open_root
from storage.errors import InputError
from tasks.config.document import load_config
from tasks.config.stored import record_config
from tests.bad_input.test_command import CONFIG

SCORE = "def score(record, response):\n    return 1.0\n"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder with a configuration, and the working directory."""
    for folder in ("there", "here"):
        (tmp_path / folder).mkdir()
    (tmp_path / "there" / "run.toml").write_text(CONFIG + '[reward]\nfunction = "my_reward.py:score"\n')
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize(("folders", "found"), [(["there"], "there"), (["here"], "here"), (["there", "here"], "there")])
def test_beside_the_configuration_comes_first(places, folders, found):
    for folder in folders:
        (places / folder / "my_reward.py").write_text(SCORE)
    config = load_config(str(places / "there" / "run.toml"))
    assert config.reward.function == f"{places / found / 'my_reward.py'}:score"


def test_two_different_files_are_refused(places):
    (places / "there" / "my_reward.py").write_text(SCORE)
    (places / "here" / "my_reward.py").write_text(SCORE.replace("1.0", "2.0"))
    with pytest.raises(InputError, match=r"there/my_reward.py and .*here/my_reward.py are different files"):
        load_config(str(places / "there" / "run.toml"))


def test_a_file_that_is_nowhere_is_refused_with_both_places(places):
    with pytest.raises(InputError, match=r"there is no file my_reward.py in .*/there or .*/here"):
        load_config(str(places / "there" / "run.toml"))


def test_each_of_several_functions_is_found(places):
    (places / "there" / "my_reward.py").write_text(SCORE)
    several = '[[reward.functions]]\nname = "a"\nfunction = "my_reward.py:score"\n'
    (places / "there" / "run.toml").write_text(CONFIG + several)
    (one,) = load_config(str(places / "there" / "run.toml")).reward.functions
    assert one.function == f"{places / 'there' / 'my_reward.py'}:score"


@pytest.mark.parametrize("form", ["one", "several"])
def test_wherever_the_file_and_the_start_are_it_is_the_same_run(places, monkeypatch, form):
    if form == "several":
        several = '[[reward.functions]]\nname = "a"\nfunction = "my_reward.py:score"\n'
        (places / "there" / "run.toml").write_text(CONFIG + several)
    (places / "there" / "my_reward.py").write_text(SCORE)
    root = open_root(str(places / "root"))
    digest = record_config(root, "run", load_config(str(places / "there" / "run.toml")))
    monkeypatch.chdir(places / "there")
    assert record_config(root, "run", load_config("run.toml")) == digest
    (places / "there" / "my_reward.py").write_text(SCORE + "# repaired\n")
    assert record_config(root, "run", load_config("run.toml")) == digest
    shutil.move(places / "there", places / "elsewhere")
    monkeypatch.chdir(places / "elsewhere")
    moved = load_config("run.toml")
    assert record_config(root, "run", moved) == digest
    named = Path("my_reward.py").rename("other.py")
    (places / "elsewhere" / "run.toml").write_text(Path("run.toml").read_text().replace("my_reward.py", named.name))
    with pytest.raises(InputError, match=r"now given .*other\.py:score"):
        record_config(root, "run", load_config("run.toml"))


def test_a_runtime_setting_of_the_reward_may_change(places):
    (places / "there" / "my_reward.py").write_text(SCORE)
    path, root = str(places / "there" / "run.toml"), open_root(str(places / "root"))
    digest = record_config(root, "run", load_config(path))
    runtime = ("max_failures=0.3", "start_deadline_s=9", "deadline_s=3", "processes=2")
    assert record_config(root, "run", load_config(path, [f"reward.{one}" for one in runtime])) == digest
    for meaning in ("batch=true", "weights.a=2"):
        with pytest.raises(InputError, match="started with different settings"):
            record_config(root, "run", load_config(path, [f"reward.{meaning}"]))
