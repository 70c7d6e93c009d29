"""The wheel outside a checkout, and the base of Ratchet without trainer and engines."""

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tasks.config.code_version import PROJECT_ROOT, code_version
from tests.small.stored import stored_run

PROJECT = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "prefect", "datasets", "math_verify", "sqlalchemy")
"""Packages of the extras that the base must do without."""
TAKEN_IF_THERE = ("pandas", "pytz", "cloudpickle", "python-multipart", "watchfiles", "sniffio")
"""Packages that those of the base import only where they are installed."""
BLOCKED = f"""
import sys
import tarfile
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """The wheel as pip installs it without dependencies: unpacked into a folder of packages."""
    folder = tmp_path_factory.mktemp("wheel")
    built = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(built, cwd=PROJECT_ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    assert stored_run(folder) == "small"
    return folder / "runs"


def python(code: str, packages: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


def command(words: list[str], packages: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """`ratchet WORDS`, called as by the script that pip makes."""
    return python(f"import sys; sys.argv = {['ratchet', *words]!r}; import ratchet; ratchet.main()", packages, folder)


def test_the_command_is_the_public_module():
    assert PROJECT["scripts"] == {"ratchet": "ratchet:main"}


def executed(commands: list[list[str]], packages: Path, folder: Path, before: str = "") -> list[list[Any]]:
    """Exit code, standard output and error of each command, one after another in one process."""
    code = f"""{before}
import contextlib, io, json, sys, ratchet
from flows.cli.app import execute
found = []
for words in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = execute(words)
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""
    done = python(code, packages, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_commands_work_from_the_wheel(installed, tmp_path):
    said = {
        ("--help",): "RL post-training",
        ("demo", "--help"): "Teach a tiny model to add",
        ("bench", "--help"): "Measure parts of Ratchet",
        ("config",): "rollout",
        ("check", f"{installed}/infra/examples/demo.toml"): "trainer",
    }
    found = executed([list(words) for words in said], installed, tmp_path)
    for (code, out, err), text in zip(found, said.values(), strict=True):
        assert (code, text in out) == (0, True), err


@pytest.mark.slow
def test_the_tutorial_s_steps_from_the_wheel_that_take_no_minutes(installed, tmp_path):
    page = (PROJECT_ROOT / "docs" / "tutorial.md").read_text()
    steps = re.findall(r"^\| `(.*?)`", page.partition("\n## From the wheel")[2], re.MULTILINE)
    environment, unpack, pins, wheel, *commands = [step.split() for step in steps]
    assert (environment[:3], wheel[:3]) == (["python3.12", "-m", "venv"], ["pip", "install", "--no-deps"])
    (file,) = installed.parent.glob("*.whl")
    assert file.name in unpack
    shutil.copy(file, tmp_path)
    subprocess.run([sys.executable, *unpack[1:]], cwd=tmp_path, check=True)
    assert (tmp_path / pins[-1]).read_bytes() == (PROJECT_ROOT / "infra" / "requirements" / "cpu.txt").read_bytes()
    with tarfile.open(PROJECT_ROOT / "tests" / "integration" / "golden" / "run.tar.gz") as archive:
        archive.extractall(tmp_path / "runs", filter="data")  # in place of the demo, which takes minutes
    short = [words for words in commands if words[1] in ("samples", "verify", "export")]
    assert len(short) == 3
    names = {"demo": "golden", "demo@best": "golden@best.reward"}
    words = [[names.get(word, word) for word in step[1:]] for step in short]
    for code, _, err in executed(words, installed, tmp_path):
        assert code == 0, err


@pytest.mark.slow
def test_the_wheel_has_what_its_commands_read_and_the_code_of_the_checkout(installed, tmp_path):
    code = """
import json, ratchet
from importlib.metadata import distribution
from flows.cli.app import DEMO_CONFIG
from flows.cli.site import DEPLOYMENTS
from flows.site.entries import read_deployments
from tasks.config.code_version import PROJECT_ROOT, code_version
entries = read_deployments(DEPLOYMENTS)
pins = [(PROJECT_ROOT / "infra" / "requirements" / f"{name}.txt").stat().st_size for name in ("cpu", "gpu")]
config = ratchet.load_config(str(DEMO_CONFIG))
files = distribution("ratchet").read_text("RECORD")
print(json.dumps([ratchet.__file__, code_version(), len(entries), min(pins) > 1000, config.run.iterations,
                  "storage/py.typed" in files]))
"""
    done = python(code, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    where, version, entries, pins, iterations, typed = json.loads(done.stdout)
    assert Path(where) == installed / "ratchet.py"
    assert version == code_version()
    assert entries > 5
    assert iterations == 20
    assert pins
    assert typed


@pytest.mark.slow
def test_the_user_s_files_do_not_hide_those_of_the_wheel(installed, tmp_path):
    (tmp_path / "tasks.py").write_text("")
    (tmp_path / "infra").mkdir()
    done = command(["--help"], installed, tmp_path)
    assert (done.returncode, done.stderr) == (2, f"ratchet: {shadowing('tasks', tmp_path / 'tasks.py', installed)}\n")
    (tmp_path / "tasks.py").unlink()
    assert command(["bench", "--help"], installed, tmp_path).returncode == 0


def shadowing(name: str, theirs: Path, packages: Path) -> str:
    ours = packages / name / "__init__.py"
    return f"`import {name}` gives {theirs}, but Ratchet needs {ours}: rename that file or folder, or move it"


LOOKING = ("ls", "status small", "show small", "samples small", "report small", "lineage small@1", "verify small",
           "config small", "gc small")  # fmt: skip


@pytest.mark.slow
def test_the_base_looks_at_runs(runs):
    commands = [[*text.split(), "--root", str(runs)] for text in LOOKING]
    found = executed(commands, PROJECT_ROOT, runs.parent, BLOCKED)
    assert [(words[0], code) for words, (code, _, _) in zip(commands, found, strict=True)] == [
        (words[0], 0) for words in commands
    ], found


@pytest.mark.slow
def test_a_command_that_needs_an_extra_names_it_and_the_two_commands(runs):
    export = ["export", "small", "--to", "model", "--root", str(runs)]
    for code, out, err in executed([["demo"], export, ["up"]], PROJECT_ROOT, runs.parent, BLOCKED):
        assert (code, out) == (2, "")
        assert re.search(r"this needs (torch|ray|prefect|transformers|megatron), which is not installed", err)
        pins, wheel = err.splitlines()[-2:]
        assert Path(pins.split()[-1]).exists()
        assert wheel.strip() == f"pip install --no-deps ratchet-{PROJECT['version']}-py3-none-any.whl"


def test_the_public_module_says_it_too(runs):
    code = f"{BLOCKED}\nimport ratchet\nratchet.Run('small', {str(runs)!r}).train(settings=['run.iterations=3'])"
    done = python(code, PROJECT_ROOT, runs.parent)
    assert "InputError: this needs" in done.stderr


@pytest.mark.slow
def test_looking_imports_only_what_the_base_requires(runs):
    code = f"""
import sys, ratchet
run = ratchet.Run("small", {str(runs)!r})
run.curves(), run.samples(), run.verify(), run.status()
import flows.cli.app, flows.viewer.server
from flows.views.reports import write_report
write_report(ratchet.open_root(run.root), run.name)
print(" ".join(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""
    done = python(code, PROJECT_ROOT, runs.parent)
    assert done.returncode == 0, done.stderr
    owners = importlib.metadata.packages_distributions()
    used = {canonicalize_name(owner) for name in done.stdout.split() for owner in owners.get(name, ())}
    assert used - {"ratchet", "setuptools", *TAKEN_IF_THERE} <= base_closure()


@functools.cache
def base_closure() -> frozenset[str]:
    """Names of the distributions that the base dependencies bring."""
    found: dict[tuple[str, str], None] = {}
    wanted = [Requirement(line) for line in PROJECT["dependencies"]]
    while wanted:
        one = wanted.pop()
        for extra in ("", *one.extras):
            key = (canonicalize_name(one.name), extra)
            if key not in found:
                found[key] = None
                wanted += [inner for inner in requirements(one.name) if applies(inner, extra)]
    return frozenset(name for name, _ in found)


def requirements(name: str) -> list[Requirement]:
    try:
        return [Requirement(line) for line in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:  # of another platform
        return []


def applies(one: Requirement, extra: str) -> bool:
    return one.marker is None or one.marker.evaluate({"extra": extra})


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_the_pins_hold_every_requirement(variant):
    text = (PROJECT_ROOT / "infra" / "requirements" / f"{variant}.txt").read_text()
    pinned = dict(re.findall(r"^([a-z0-9][\w.-]*)(?:\[[^]]*\])?==([^\s;]+)", text, re.MULTILINE))
    extras = PROJECT["optional-dependencies"]
    assert extras[variant][0] == "ratchet[trainer]"
    for line in [*PROJECT["dependencies"], *extras["trainer"], *extras[variant][1:]]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)], prereleases=True), line
