"""The command line: its refusals with message and exit code, and the stream of each output."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from flows.cli.app import DEFAULT_ROOT, app, execute, new_name
from flows.cli.options import Changes, Common
from storage import errors
from storage.backends.root import Root
from storage.ids import check_run_name
from tests.flows.runs import MINIMAL, MakeRun

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "rollout.sample=4"], "rollout.sample: unknown key; did you mean 'rollout.samples'?"),
        (["--set", "rollout.samples"], "--set 'rollout.samples' is not of the form section.key=value"),
        (["--set", "rollout.samples=0"], "rollout.samples: Input should be greater than or equal to 1"),
        (["--iterations=-1"], "run.iterations"),
        (["--iterations=many"], "Invalid value"),
        (["--set", "train.policy.clip_low=-1"], "clip_low"),
        ([], "the run has no id: set run.name in"),
        (["--run", "Not OK"], "run name 'Not OK' cannot be used"),
        (["--nonsense"], "Unknown option"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    config_file: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    assert execute(["run", str(config_file), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist: give the path of a TOML file"), ("[run", "is not valid TOML"), ("", "model: this key is")],
    ids=["missing", "malformed", "empty"],
)
def test_a_bad_configuration_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
):
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_text(content)
    assert execute(["run", str(path), "--run", "a"]) == 2
    assert message in capsys.readouterr().err


def test_status_as_json_is_the_only_thing_on_standard_output(make_run: MakeRun, root: Root):
    make_run("a", 2)
    command = [sys.executable, "-m", "flows", "status", "a", "--root", root.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=True)
    document = json.loads(done.stdout)
    assert (document["run"], document["iterations"], document["current"]) == ("a", 2, 3)
    assert len(document["history"]) == 3
    assert len(done.stdout.splitlines()) == 1


def test_status_for_people(make_run: MakeRun, root: Root, capsys: pytest.CaptureFixture[str]):
    make_run("a", 4)
    assert execute(["status", "a", "--root", root.url]) == 0
    assert "run a: 4 iterations complete" in capsys.readouterr().out


@pytest.mark.parametrize("run", ["missing", "../up"])
def test_status_of_an_unknown_run_is_refused(root: Root, capsys: pytest.CaptureFixture[str], run: str):
    assert execute(["status", run, "--root", root.url]) == 2
    assert repr(run) in capsys.readouterr().err


def test_status_needs_no_heavy_library():
    code = "import sys, flows.__main__; print(sorted({'torch', 'ray', 'vllm', 'prefect'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=True)
    assert done.stdout.strip() == "[]"


def test_every_demo_is_a_new_run():
    names = {new_name("demo") for _ in range(20)}
    assert len(names) > 1
    for name in names:
        assert re.fullmatch(r"demo-\d{8}-\d{6}-[0-9a-f]{4}", check_run_name(name))


def test_the_command_that_continues_names_everything_that_was_given():
    changes = Changes(iterations=5, settings=("rollout.samples=4",))
    command = Common(json=True).again(["run", "my.toml", "--run=a", *changes.options])
    options = ["--run=a", "--iterations=5", "--set=rollout.samples=4", f"--root={DEFAULT_ROOT}", "--json"]
    assert shlex.split(command)[-7:] == ["run", "my.toml", *options]


def check_refused_before_the_start(
    command: list[str], root: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute([*command, "--run", "a", "--root", root, "--json"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not list(Path(root).rglob("run.json")), "a refused run must leave no record that binds the next start"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.parallel.pipeline=3", "pipeline"),
        ("train.parallel.tensor=3", "tensor"),
        ("reward.function=no.such:function", "no.such"),
        ("train.max_length=64", "train.max_length"),
    ],
)
def test_what_cannot_work_is_found_before_anything_starts(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
):
    command = ["run", str(config_file), "--set", setting]
    check_refused_before_the_start(command, str(tmp_path / "runs"), message, capsys)


@pytest.mark.parametrize("root", ["memory://runs", "ftp://host/runs", "file:///proc/ratchet"])
def test_a_root_that_cannot_hold_a_run_is_refused(config_file: Path, capsys: pytest.CaptureFixture[str], root: str):
    check_refused_before_the_start(["run", str(config_file)], root, root, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), ("", "is empty"), ('{"prompt": "1+1="}\n{"prompt": ', "line 2: not valid JSON")],
    ids=["missing", "empty", "malformed"],
)
def test_a_data_set_that_cannot_be_used_is_found_before_anything_starts(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
):
    data = tmp_path / "train.jsonl"
    if content is not None:
        data.write_text(content)
    config_file.write_text(MINIMAL.replace("[data.generate]", f'[data]\ntrain = "{data}"'))
    check_refused_before_the_start(["run", str(config_file)], str(tmp_path / "runs"), message, capsys)


def test_a_literal_secret_is_refused_before_the_start(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["run", str(config_file), "--set", "reward.arguments.api_key=sk-4711"]
    assert execute([*command, "--run", "a", "--root", str(tmp_path / "runs")]) == 2
    captured = capsys.readouterr()
    assert "reward.arguments.api_key would be stored with the run" in captured.err
    assert '"env:NAME"' in captured.err
    assert "sk-4711" not in captured.err
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize(
    "command", [["ls"], ["status", "a"], ["verify", "a"], ["run", "x.toml", "--run", "a"], ["demo"]]
)
def test_a_root_with_credentials_in_its_url_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert execute([*command, "--root", "s3://AKIA1:s3cret@bucket/runs"]) == 2
    captured = capsys.readouterr()
    assert "s3://***@bucket/runs has credentials in its URL" in captured.err
    assert "s3cret" not in captured.err + captured.out


def test_the_command_that_continues_shows_no_secret():
    settings = ("reward.arguments.api_key=sk-4711", "data.train=https://u:sk-4711@h/a", "reward.arguments.token=env:T")
    words = ["run", "https://host/my.toml?sig=sk-4711", *Changes(settings=settings).options]
    command = Common("https://u:sk-4711@host/runs").again(words)
    assert "sk-4711" not in command
    assert "--set=reward.arguments.token=env:T" in command


def test_config_prints_the_reference_the_page_an_example_and_the_schema(capsys: pytest.CaptureFixture[str]):
    def said(*options: str) -> str:
        assert execute(["config", *options]) == 0
        return capsys.readouterr().out

    assert re.search(r"^  samples +whole number, at least 1 +8 +meaning +Samples of each prompt", said(), re.MULTILINE)
    assert said("--markdown") == (PROJECT / "docs" / "configuration.md").read_text()
    assert tomllib.loads(said("--example"))["rollout"]["samples"] == 8


def test_the_schema_is_one_line_of_json(capfd: pytest.CaptureFixture[str]):
    assert execute(["config", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["$defs"]["RolloutSection"]["properties"]["samples"]["default"] == 8
    assert execute(["config", "--json", "--example"]) == 2
    assert "give only one of them" in capfd.readouterr().err


def leaves(group: App, *names: str) -> Iterator[tuple[str, App]]:
    """Every command with its name, those of groups too."""
    inner = [name for name in group if not name.startswith("-")]
    if not inner:
        yield " ".join(names), group
    for name in inner:
        yield from leaves(group[name], *names, name)


def test_every_command_that_reports_facts_has_json():
    without = [
        name
        for name, command in leaves(app)
        if not any("--json" in one.names for one in command.assemble_argument_collection())
    ]
    assert without == ["completion"]


def test_the_page_has_the_exit_code_of_every_error():
    rows = re.findall(r"^\| (\d) \| .* \| (.*) \|$", (PROJECT / "docs" / "operations.md").read_text(), re.MULTILINE)
    named = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.RatchetError)]
    assert named == {kind.__name__: kind.exit_code for kind in kinds if kind is not errors.RatchetError}
