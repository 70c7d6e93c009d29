"""A run that was killed is continued two days later, in a root with damaged, newer, forked and cleaned runs."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage import layout
from storage.backends.root import Root, open_root
from storage.manifest import need
from storage.upkeep.fork import fork
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.forks import Forks
from tests.storage.runs import DOCUMENT, age, make_run
from tests.storage.worker import STAGES

SHARED, FIRST = 2, 3
"""Iterations that the run shares with its parent, and its own one."""

TROUBLES = {
    "damaged": lambda root: root.replace(layout.manifest_key("other", 0, Stage.TRAIN, 0), b"{}"),
    "none": lambda _: None,
}


def make_root(folder: Path, trouble: str) -> Root:
    """A run that is a fork, its parent, and another run."""
    root = open_root(str(folder / "root"))
    make_run(root, "parent", 3)
    make_run(root, "other", 1)
    TROUBLES[trouble](root)
    fork(root, WORKFLOW, "parent", SHARED, "run", "c0", DOCUMENT)
    return root


def results(root: Root) -> list[str]:
    return [need(root, "run", FIRST, stage).digest for stage in STAGES]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, forks: Forks) -> tuple[list[str], int]:
    """The result of the run alone, and its number of system calls."""
    root = make_root(tmp_path_factory.mktemp("whole"), "none")
    ended = forks.run(str(root.folder), "-1", str(FIRST))
    assert ended.returncode == 0, ended.stderr
    return results(root), int(ended.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("trouble", "share"), [("damaged", 0.3), ("none", 0.6), ("none", 0.9)])
def test_a_run_comes_to_the_same(tmp_path, forks: Forks, undisturbed, trouble, share):
    expected, calls = undisturbed
    root = make_root(tmp_path, trouble)
    killed = forks.run(str(root.folder), str(int(calls * share)), str(FIRST))
    assert killed.returncode == -9, killed.stderr
    for key in root.keys(""):
        age(root, key)
    with ThreadPoolExecutor(1) as pool:
        continued = pool.submit(forks.run, str(root.folder), "-1", str(FIRST))
        while not continued.done():  # its parent is cleaned all the time
            collect(root, WORKFLOW, "parent", Retention(newest=1), apply=True)
        assert continued.result().returncode == 0, continued.result().stderr
    assert results(root) == expected
    report = verify(root, "run")
    assert report.sound, report.findings
    assert root.exists(need(root, "run", SHARED, Stage.TRAIN).parts[0].key)
    if trouble == "none":  # then only age protects orphans: a touched part may have another name
        assert [one.key for one in report.findings if not layout.is_temporary(one.key)] == []
