"""Targets of links and names in the documents exist."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from infra.mutants import MUTANTS

PROJECT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(PROJECT.glob("*.md")), *sorted((PROJECT / "docs").glob("*.md"))]
SKILLS = sorted((PROJECT / ".claude" / "skills").glob("*/SKILL.md"))
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
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


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_a_skill_is_short_and_its_head_names_it(path: Path):
    text = path.read_text()
    head = re.match(r"---\nname: (\S+)\ndescription: .{40,}\n---\n", text)
    assert head is not None
    assert (head[1], len(text.splitlines()) <= 60) == (path.parent.name, True)


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
