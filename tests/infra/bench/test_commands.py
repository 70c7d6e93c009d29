"""`ratchet bench`: found by the command line without an import, also from an installed wheel."""

import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from flows.cli.app import execute

PROJECT = Path(__file__).resolve().parents[3]
COMMANDS = ("faults", "loop", "memory", "overhead", "rollout", "storage", "sync", "train")


@pytest.mark.slow
def test_no_command_imports_a_bench_until_it_is_called():
    code = "import sys, flows.__main__; print([name for name in sys.modules if name.startswith('infra')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_benches_are_commands_with_their_options(capsys: pytest.CaptureFixture[str]):
    assert execute(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in COMMANDS if f"│ {name} " not in said] == []
    assert execute(["completion", "bash"]) == 0
    assert "--transport" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sync", "--case=huge"], 'Invalid value "huge" for --case'),
        (["rollout", "--case=tiny", "--pairs=0"], "0 pairs of None samples"),
        (["train", "--case=tiny", "--pairs=0"], "0 pairs"),
        (["storage", "--run=missing"], "missing"),
        (["overhead", "--iterations=0"], "--iterations"),
        (["loop", "--iterations=2"], "give 3 or more"),
        (["faults", "--iterations=2", "--every=3"], "none of 2 iterations would have a failure"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert execute(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_the_wheel_contains_them():
    files = {file.distribution_path for file in WheelBuilder(str(PROJECT)).recurse_included_files()}
    sources = {path.relative_to(PROJECT).as_posix() for path in (PROJECT / "infra" / "bench").glob("*.py")}
    assert sources <= files
    assert not any(path.startswith(("tests/", "infra/mutants")) for path in files)
