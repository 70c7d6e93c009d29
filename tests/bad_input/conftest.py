"""Run commands with bad input: their messages, and the modules that they have imported by then."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.config.code_version import PROJECT_ROOT


@dataclass(frozen=True)
class Outcome:
    """Result of a command."""

    code: int
    """Exit code."""
    said: str
    """Standard output and standard error."""
    imported: list[str]
    """Those of Ray, vLLM, Megatron and Prefect that it imported."""


Command = Callable[..., Outcome]


@pytest.fixture(scope="session")
def command():
    """Carries out a command, given its arguments and its working directory, in a fork of a clean interpreter.

    Keyword arguments are added to its environment.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bad_input.clean"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT_ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def carry_out(arguments: list[str], folder: Path, **environment: str) -> Outcome:
        process.stdin.write(
            json.dumps({"arguments": arguments, "folder": str(folder), "environment": environment}) + "\n"
        )
        process.stdin.flush()
        return Outcome(**json.loads(process.stdout.readline()))

    yield carry_out
    process.stdin.close()
    process.wait()


def check_refused(
    command: Command, folder: Path, files: Mapping[str, str], settings: Sequence[str], words: Sequence[str]
) -> None:
    """Check that a run of `run.toml` with these settings is refused in these words before anything heavy is imported,
    without a secret, and that it leaves nothing."""
    for name, text in files.items():
        (folder / name).write_text(text)
    given = [word for setting in settings for word in ("--set", setting)]
    outcome = command(["run", "run.toml", "--run", "a", *given], folder)
    assert outcome.code == 2, outcome.said
    assert all(word in outcome.said for word in words), outcome.said
    assert "4711" not in outcome.said
    assert "Traceback" not in outcome.said
    assert outcome.imported == []
    assert {path.name for path in folder.iterdir()} == files.keys()
