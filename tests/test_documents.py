"""Targets of links and names in the documents exist."""

import re
import tomllib
from pathlib import Path

import pytest

from infra.mutants import MUTANTS

PROJECT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(PROJECT.glob("*.md")), *sorted((PROJECT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
CODE_PATH = re.compile(r"`((?:flows|tasks|trainer_core|storage|infra|docs|tests)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_path_leads_somewhere(document: Path):
    text = document.read_text()
    links = [document.parent / link for link in LINK.findall(text)]
    missing = [
        str(path) for path in [*links, *(PROJECT / path for path in CODE_PATH.findall(text))] if not path.exists()
    ]
    assert not missing


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
