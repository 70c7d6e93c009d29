"""The public module from outside the checkout: its names, its imports, and users' files with the names of ours."""

import ast
import asyncio
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ratchet
from flows.cli.options import DEFAULT_ROOT
from storage.errors import InputError
from tests.pages import examples
from tests.small.stored import stored_run

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ratchet.Run:
    """A stored run."""
    folder = tmp_path_factory.mktemp("stored")
    return ratchet.Run(stored_run(folder), str(folder / "runs"))


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python process of a user, in a folder of theirs."""
    ours = ("HF_HUB_OFFLINE", "RAY_")  # a test before this one may have prepared this process
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment["PYTHONPATH"] = str(PROJECT)
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def test_every_name_is_handed_on_from_where_types_say():
    tree = ast.parse(Path(ratchet.__file__).read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == ratchet._LAZY
    for name in ratchet.__all__:
        assert vars(ratchet)[name] if name in vars(ratchet) else getattr(ratchet, name)
    for name, module in ratchet._LAZY.items():
        assert getattr(ratchet, name) is vars(importlib.import_module(module))[name]
    assert dir(ratchet) == sorted(ratchet.__all__)
    assert ratchet.DEFAULT_ROOT == DEFAULT_ROOT


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(AttributeError, match=r"no attribute 'runs': it has .*\bsamples\b"):
        ratchet.runs  # noqa: B018


def test_it_prepares_prefect_and_ray_and_leaves_the_hub_alone(tmp_path):
    code = "import ratchet, os; print(os.environ['RAY_worker_niceness'], os.environ.get('HF_HUB_OFFLINE'))"
    assert python(tmp_path, "-c", code).stdout.split() == ["0", "None"]


def beside(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine = 1\n")
    return path


@pytest.mark.parametrize("name", ["tasks.py", "flows/__init__.py", "storage/__init__.py", "trainer_core.py"])
@pytest.mark.parametrize("first", [False, True], ids=["ours-first", "theirs-first"])
def test_a_file_of_the_user_with_our_name_is_named(tmp_path, name, first):
    theirs = beside(tmp_path, name)
    package = name.removesuffix("/__init__.py").removesuffix(".py")
    done = python(tmp_path, "-c", f"import {package}, ratchet" if first else "import ratchet")
    assert done.returncode == 1
    assert f"ImportError: `import {package}` gives {theirs}, but Ratchet needs" in done.stderr
    assert "rename that file or folder" in done.stderr


def test_the_command_says_it_without_a_traceback(tmp_path):
    theirs = beside(tmp_path, "tasks.py")
    done = python(tmp_path, "-m", "ratchet", "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ratchet: `import tasks` gives {theirs}")


def test_a_folder_of_data_with_our_name_does_no_harm(tmp_path):
    beside(tmp_path, "storage/notes.txt")
    (tmp_path / "flows").mkdir()
    done = python(tmp_path, "-c", "import ratchet; print(ratchet.Run('a').root, ratchet.load_config.__name__)")
    assert done.stdout.split() == [DEFAULT_ROOT, "load_config"], done.stderr


def test_a_stored_run_is_looked_at(run):
    records = run.iterations()
    assert [record.iteration for record in records] == [0, 1, 2]
    curves = run.curves()
    assert curves["iteration"].to_pylist() == [0, 1, 2]
    assert curves["reward/reward_mean"].to_pylist()[1] == records[1].reward
    table = run.samples([1])
    assert table.num_rows == ratchet.samples(run.name, root=run.root, iterations=[1], texts=False).num_rows > 0
    assert all(isinstance(text, str) for text in table["response"].to_pylist())
    assert run.verify().sound


def test_a_folder_and_a_configuration_may_be_objects(run):
    assert ratchet.Run(run.name, Path(run.root)).iterations() == run.iterations()
    tables = {"model": {"generate": {}}, "data": {"generate": {}}, "train": {"max_length": 16}}
    tables["train"]["optimizer"] = {"learning_rate": 1e-3}
    made = ratchet._configured(tables, ["run.seed=7"])
    assert made.run.seed == 7
    assert ratchet._configured(made, ["run.seed=8"]).run.seed == 8
    assert ratchet.load_config(PROJECT / "infra" / "examples" / "demo.toml", "run.seed=9").run.seed == 9
    assert run.samples(1).equals(run.samples([1]))
    with pytest.raises(ratchet.InputError, match=r"there is no run 'other'.*, which has small"):
        ratchet.retrain("new", f"{run.name}@1", "other", root=run.root)


def test_a_complete_run_has_nothing_to_do(run, capsys):
    async def cell() -> ratchet.RunResult:
        return run.train(settings=["engine.max_num_seqs=8"])

    done = asyncio.run(cell())
    assert (done.run, done.iterations) == (run.name, 2)
    assert done.report is not None
    assert "nothing to do: run small already has all 2 iterations" in capsys.readouterr().err


def test_within_a_running_event_loop_nothing_runs_in_it(run):
    async def cell() -> int:
        loop = asyncio.get_running_loop()
        with ratchet._with_extra(), pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        assert asyncio.get_running_loop() is loop
        return run.samples([1]).num_rows

    assert asyncio.run(cell()) > 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: ratchet.Run("other", run.root).samples(), "no run 'other'"),
        (lambda run: run.samples([7]), r"iterations \[7\] of run 'small' have no samples"),
        (lambda run: run.train(settings=["rollout.sample=3"]), r"did you mean 'rollout\.samples'"),
        (lambda run: run.train(run.root + "/no.toml"), "does not exist"),
        (lambda run: run.train(settings=[("run.seed", 7)]), "settings has .*run.seed.*: give texts of the form"),
        (lambda run: run.train(3), "the configuration is of the type int: give a path, a RunConfig or its tables"),
        (lambda run: run.train({"runs": {}}), "given to Run.train cannot be used:(.|\n)*runs: unknown key"),
        (lambda run: ratchet.Run("a", "s3://me:secret@host/runs").samples(), "has credentials in its URL"),
        (lambda run: run.export("anywhere", at=9), "iteration 9 of run 'small' is not there"),
        (
            lambda run: run.export("anywhere", critics=True),
            "an export has the settings precision, adapter, critic; wrong",
        ),
        (lambda run: run.export("anywhere", adapter=True, critic=True), "adapter and critic name two models"),
        (lambda run: run.evaluate(sample=3), "an evaluation has the settings table, prompts"),
        (lambda run: ratchet.retrain("new", root=run.root), "say with which state it begins"),
    ],
)
def test_what_cannot_work_is_an_error_before_anything_starts(run, call, said):
    with pytest.raises(InputError, match=said):
        call(run)
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


def test_the_examples_of_the_page_that_look_at_a_run(run, tmp_path):
    done = python(tmp_path, "-c", examples("python.md", "Look", {"my-run": run.name, "./runs": run.root}))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 True")
    assert len(done.stdout.splitlines()) == 4


def test_the_example_of_an_environment_is_played(monkeypatch):
    monkeypatch.chdir(PROJECT)
    names: dict[str, Any] = {}
    exec(examples("extending.md", "Environment", {}), names)
    assert 1 <= len(names["turns"]) <= 7
