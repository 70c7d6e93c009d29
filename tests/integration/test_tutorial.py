"""Every command of docs/tutorial.md, in order, with its output; and by hand those of other pages that take minutes."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.config.code_version import PROJECT_ROOT
from tests.forked_python import of_workers
from tests.integration.command import TINY

PAGE = PROJECT_ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.M | re.S)
SHORTER = {"iterations = 30": "iterations = 10", "first@30": "first@10", "--iterations 32": "--iterations 12"}
FEWER = 256  # records of each file of the chat model; the page has twelve thousand
_NUMBER = re.compile(r"\d+(?:\\\.\d+)?")
_FIGURES = re.compile(r" \\\| .*")


def blocks() -> list[tuple[str, str, str]]:
    """Language, title and text of each block of the page."""
    return _BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands of a block, each with the lines that are shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line != "...":
            found[-1][1].append(line)
    return found


def shorter(text: str) -> str:
    """The run of the page with a third of its iterations."""
    for old, new in SHORTER.items():
        text = text.replace(old, new)
    return text


def said(line: str, output: str) -> bool:
    """True if the output has a line like this one; numbers, and the figures of an iteration, may differ."""
    pattern = _NUMBER.sub(r"\\d+(?:\\.\\d+)?", _FIGURES.sub(" .*", re.escape(line).replace(r"\ ", " ")))
    return re.search(f"^{pattern}$", output, re.M) is not None


@pytest.fixture
def environment(tmp_path: Path, home: Path) -> dict[str, str]:
    (tmp_path / "infra").symlink_to(PROJECT_ROOT / "infra")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("ratchet", "-m flows"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {home}/python {words} "$@"\n')
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        **of_workers(home / "python"),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(PROJECT_ROOT),
        "PREFECT_HOME": str(home),
    }


@pytest.fixture
def carried_out(tmp_path: Path, environment: dict[str, str]) -> Callable[[list[str]], str]:
    """Carries a command out in an empty folder, and gives what it wrote."""

    def carry_out(command: list[str]) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout + done.stderr

    return carry_out


@pytest.mark.slow
def test_every_command_does_what_the_page_says(tmp_path: Path, home: Path, carried_out: Callable[[list[str]], str]):
    count = 0
    for language, title, text in blocks():
        if title:
            (tmp_path / "first" / title).write_text(text)
        elif language == "python":
            carried_out([str(home / "python"), "-c", text])
        for command, lines in commands(text) if language == "console" else ():
            output = carried_out(["sh", "-c", shorter(command)])
            if command == "ratchet init first":
                config = tmp_path / "first" / "run.toml"
                config.write_text(shorter(config.read_text()))
            if command == "python infra/examples/chat/make.py chat":
                for file in (tmp_path / "chat").glob("*.jsonl"):
                    file.write_text("".join(file.open().readlines()[:FEWER]))
            assert [line for line in lines if not said(line, output)] == [], output
            count += 1
    assert count == PAGE.read_text(encoding="utf-8").count("\n$ ")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("docs/recipes.md", "LoRA for a chat model of your own"),
        ("docs/recipes.md", "Tools"),
        ("docs/recipes.md", "Distillation"),
        ("docs/recipes.md", "Nightly retraining"),
        ("docs/durability.md", "Proof: `ratchet prove-resume`"),
        ("README.md", "Proof that nothing is lost"),
    ],
)
def test_commands_that_take_minutes_end_well(carried_out, tmp_path: Path, page: str, heading: str):
    shutil.copy(TINY, tmp_path / "my.toml")
    section = (PROJECT_ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^(?:ratchet|python) .*$", section, re.MULTILINE)
    assert lines
    for line in lines:
        if not line.startswith("ratchet up"):  # a site: tests/flows/site
            carried_out(["sh", "-c", line])
