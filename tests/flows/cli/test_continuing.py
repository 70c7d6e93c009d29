"""Continuing a run by its name alone, from its record; every command that is printed for that works."""

import json
import shlex
import shutil
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.cli.app import execute
from flows.cli.check import names_a_run, of_stored
from flows.preflight import check_start
from storage import records
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.layout import removal_key
from storage.upkeep.catalog import Removal
from tasks.config.document import parse_config
from tasks.config.stored import read_config, stored_config
from tasks.forking import begin_retraining, retrain_config
from tasks.importing.rows import ImportOrder
from tasks.importing.samples import import_samples
from tests.small.config import small_config
from tests.small.driving import RUN, driver


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    root = open_root(str(folder / "runs"))
    driver(root, small_config(["run.iterations=1"]), folder / "scratch").drive()
    return folder / "runs"


@pytest.fixture
def root(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A copy of a root with a complete run, and an empty working directory."""
    shutil.copytree(made, tmp_path / "runs")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return open_root(str(tmp_path / "runs"))


def content(root: Root) -> dict[str, bytes]:
    return {key: root.read_bytes(key) for key in root.keys("") if "/report/" not in key}


def test_a_complete_run_is_continued_by_its_name(root: Root, capfd: pytest.CaptureFixture[str]):
    before = content(root)
    assert execute(["run", RUN, f"--root={root.url}", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["iterations"] == 1
    assert content(root) == before


def test_settings_that_decide_nothing_are_replaced(root: Root):
    config = of_stored(RUN, RUN, ["run.iterations=5", "storage.keep_newest=3"], root)
    assert (config.run.iterations, config.storage.keep_newest) == (5, 3)
    assert config.meaning() == stored_config(root, RUN).meaning()
    check_start(RUN, root, config)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody"], r"no run 'nobody' in \S+, which has small"),
        (["nobody.toml"], r"nobody\.toml does not exist: give the path of a TOML file"),
        (["./small"], r"\./small does not exist: give the path of a TOML file"),
        (["s3://bucket/small"], r"s3://bucket/small cannot be read: Unable to locate credentials"),
        (["a" * 300], r"aaa cannot be read: .*File name too long"),
        ([""], r"cannot be read: .*Is a directory"),
        (["Small"], r"Small does not exist: give the path of a TOML file"),
        (["small@1"], r"small@1 does not exist"),
        ([RUN, "--run=other"], r"continued under its own name, not as 'other': `ratchet fork small@ITERATION"),
        ([RUN, "--set=rollout.samples=3"], r"rollout\.samples: the run was started with 2, but is now given 3"),
        ([RUN, "--set=rollout.sample=3"], r"did you mean 'rollout\.samples'"),
        ([RUN, "--iterations=-1"], r"run\.iterations"),
    ],
)
def test_what_is_neither_a_file_nor_a_run_to_continue_is_refused(root: Root, capfd, monkeypatch, words, said):
    nobody = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_PROFILE": None}
    for name, value in (nobody | dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    before = content(root)
    assert execute(["run", *words, f"--root={root.url}"]) == 2
    shown = capfd.readouterr().err
    assert "Traceback" not in shown
    with pytest.raises(InputError, match=said):
        raise InputError(" ".join(shown.split()))
    assert content(root) == before


def test_a_file_and_a_run_of_one_name_are_told_apart(root: Root):
    Path(RUN).mkdir()
    assert names_a_run(RUN, root)  # a folder is not a configuration
    Path(RUN).rmdir()
    Path(RUN).write_text("")
    with pytest.raises(InputError, match=r"names a file, and a run of .*: give \./small for the file"):
        names_a_run(RUN, root)
    assert not names_a_run(f"./{RUN}", root)
    assert not names_a_run(f"s3://bucket/{RUN}", root)
    Path("run.toml").write_text("")
    assert not names_a_run("run.toml", root)


def test_a_run_that_is_being_removed_or_was_imported_is_not_continued(root: Root, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt_tokens": [1], "response_tokens": [2], "logprobs": [-1.0]}')
    import_samples(root, ImportOrder((str(tmp_path / "rows.jsonl"),), "theirs", {}, 1.0))
    with pytest.raises(InputError, match="holds imported samples"):
        of_stored("theirs", None, [], root)
    records.publish(root, removal_key(RUN), Removal(time=datetime.now(UTC)))
    with pytest.raises(InputError, match="is being removed"):
        of_stored(RUN, None, [], root)


def after(text: str, words: str) -> list[str]:
    """The command that a message gives after some words."""
    line = next(line for line in text.splitlines() if words in line)
    return shlex.split(line.partition(words)[2].strip().partition(")")[0])


def test_a_fork_is_continued_by_what_it_prints_without_its_settings(root: Root, capfd):
    fork = ["fork", f"{RUN}@1", "--run=mine", "--set=train.optimizer.learning_rate=1e-4", f"--root={root.url}"]
    assert execute(fork) == 0
    program, command, *words = after(capfd.readouterr().out, "continue it with")
    assert (program, command, words) == ("ratchet", "run", ["mine", f"--root={root.url}"])
    assert names_a_run("mine", root)
    config = of_stored("mine", None, ["run.iterations=2"], root)
    check_start("mine", root, config)
    assert config.train.optimizer.learning_rate == 1e-4


def test_other_settings_are_refused_with_a_command_that_works(root: Root, capfd):
    assert execute(["run", RUN, "--set=train.optimizer.learning_rate=1e-4", f"--root={root.url}"]) == 2
    said = capfd.readouterr().err
    assert execute(["fork", f"{RUN}@1", "--run=mine", "--set=rollout.samples=4", f"--root={root.url}"]) == 0
    capfd.readouterr()
    assert after(said, "own configuration (") == ["ratchet", "run", RUN, f"--root={root.url}"]
    assert execute([*after(said, "own configuration (")[1:], "--json"]) == 0
    assert after(said, "  ratchet fork")[0] == f"{RUN}@1"
    assert execute(["fork", *after(said, "  ratchet fork")]) == 0
    assert stored_config(root, f"{RUN}-fork").train.optimizer.learning_rate == 1e-4


def test_a_configuration_is_printed_as_a_file_that_continues_the_run(root: Root, capfd):
    retrain = retrain_config(root, "again", {"start": f"{RUN}@1", "select": [RUN], "samples": 8})
    begin_retraining(root, "again", retrain)
    assert execute(["fork", f"{RUN}@1", "--run=mine", "--set=rollout.samples=4", f"--root={root.url}"]) == 0
    for run in (RUN, "again", "mine"):
        capfd.readouterr()
        assert execute(["config", run, f"--root={root.url}"]) == 0
        printed = parse_config(tomllib.loads(capfd.readouterr().out), "printed")
        assert printed == stored_config(root, run)
        check_start(run, root, printed)
        assert read_config(root, run).config == printed
        assert execute(["config", run, f"--root={root.url}", "--json"]) == 0
        assert parse_config(json.loads(capfd.readouterr().out), "printed") == printed


@pytest.mark.parametrize("words", [["nobody"], [RUN, "--example"], [RUN, "--markdown"]])
def test_what_cannot_be_printed_is_refused(root: Root, capfd, words):
    assert execute(["config", *words, f"--root={root.url}"]) == 2
    assert capfd.readouterr().out == ""
