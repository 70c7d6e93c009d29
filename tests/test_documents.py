"""Targets of links and names in the documents exist."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cyclopts import MissingArgumentError

from flows.cli.app import app, execute
from infra.mutants import MUTANTS
from storage.backends.root import open_root
from tests.small.config import small_config
from tests.small.driving import driver

PROJECT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(PROJECT.glob("*.md")), *sorted((PROJECT / "docs").glob("*.md"))]
SKILLS = sorted((PROJECT / ".claude" / "skills").glob("*/SKILL.md"))
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
COMMAND = re.compile(r"^(?:\w+=\S+ )*(ratchet .*)$|`(ratchet [^`]+)`", re.MULTILINE)
CODE_PATH = re.compile(r"`((?:flows|tasks|trainer_core|storage|infra|docs|tests)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize("document", [*DOCUMENTS, *SKILLS], ids=lambda path: path.name)
def test_every_link_and_path_leads_somewhere(document: Path):
    text = document.read_text()
    links = [document.parent / link for link in LINK.findall(text)]
    missing = [
        str(path) for path in [*links, *(PROJECT / path for path in CODE_PATH.findall(text))] if not path.exists()
    ]
    assert not missing


def site(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    (line,) = re.findall(r"\$\(PYTHON\) (-m sphinx .*) build/site", (PROJECT / "Makefile").read_text())
    words = [sys.executable, *line.split(), str(folder)]
    return subprocess.run(words, cwd=PROJECT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_command_line_reads_every_command(document: Path):
    found = COMMAND.findall(document.read_text().replace("\\\n", " "))
    for line in (block or inline for block, inline in found):
        # of alternatives the first one; what is left out is optional, and a letter stands for a number
        plain = re.sub(r"\\?\|[^\s\]]+|[\[\]]| \.\.\.", "", re.sub(r" (\|\| true|> \S+)$", "", line))
        words = [re.sub(r"^[A-Z]$", "1", word) for word in shlex.split(plain, comments=True)[1:]]
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except MissingArgumentError:  # it is mentioned, not shown
            assert line not in [block for block, _ in found], line


def test_the_site_has_every_page_needs_no_network_and_is_searched_offline(tmp_path: Path):
    pytest.importorskip("sphinx")
    built = site(tmp_path)
    assert (built.returncode, built.stderr) == (0, "")
    pages = {path: (tmp_path / path.relative_to(PROJECT)).with_suffix(".html").read_text() for path in DOCUMENTS}
    loaded = re.compile(r"<(?:script|img|source)[^>]* src=\"https?:|<link[^>]* href=\"https?:|@import|url\(https?:")
    assert not [path for path, text in pages.items() if loaded.search(text)]
    assert 'id="ratchet.Run.train"' in pages[PROJECT / "docs" / "python.md"]  # from its docstring
    terms = json.loads((tmp_path / "searchindex.js").read_text().removeprefix("Search.setIndex(").rstrip(")"))["terms"]
    assert {"rollout", "prefect"} <= set(terms)


@pytest.mark.slow
def test_every_command_of_a_skill_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    driver(open_root("file://./runs"), small_config(), tmp_path / "scratch", run="my-run").drive()
    for path in SKILLS:
        text = path.read_text()
        head = re.match(r"---\nname: (\S+)\ndescription: .{40,}\n---\n", text)
        assert head is not None
        assert (head[1], len(text.splitlines()) <= 60) == (path.parent.name, True)
        blocks = re.findall(r"^```(console|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert len(blocks) > 2
        for language, block in blocks:
            if language == "python":
                exec(block, {})
            for line in block.splitlines() if language == "console" else ():
                assert execute(shlex.split(line.removeprefix("$ ratchet "))) == 0, (line, capfd.readouterr().err)


def test_the_licence_is_the_one_that_the_package_names():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    for name in project["license-files"]:
        assert (PROJECT / name).read_text().split()[:4] == ["Apache", "License", "Version", "2.0,"]


def test_each_known_defect_names_tests_and_faults_that_exist():
    text = (
        (PROJECT / "docs" / "trainer.md").read_text().partition("## Known defects of others\n")[2].partition("\n## ")[0]
    )
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| ")][2:]
    faults = {mutant.name for mutant in MUTANTS}
    assert len(rows) > 20
    for defect, tests, named in rows:
        paths = re.findall(r"`([\w./-]+\.py)`", tests)
        assert paths, defect
        assert all((PROJECT / path).exists() or (PROJECT / "tests" / "trainer_core" / path).exists() for path in paths)
        assert set(re.findall(r"`([\w-]+)`", named)) <= faults, defect
