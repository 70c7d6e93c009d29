"""SIGKILL before every system call by which anything becomes durable or visible, on real processes and a real disk."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from storage import layout
from storage.backends.root import Root, open_root
from storage.upkeep.catalog import contents, runs
from storage.upkeep.retention import collect
from storage.upkeep.verify import verify
from tasks.stages.names import WORKFLOW
from tests.storage.forks import Forks
from tests.storage.runs import age, make_run
from tests.storage.worker import ITERATIONS, PIECES, STAGES

LATER = datetime.now(UTC) + timedelta(days=2)


def identities(folder: Path) -> list[str]:
    return [manifest.digest for manifest in contents(open_root(str(folder / "root")), "run").newest]


def rerun_after_kill(forks: Forks, folder: Path, point: int) -> None:
    """Kill one process; the next one does what is missing and no more."""
    folder.mkdir()
    killed = forks.run(str(folder / "root"), str(point))
    assert killed.returncode == -9, killed.stderr
    committed = len(identities(folder))
    again = forks.run(str(folder / "root"), "-1")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("done ") == ITERATIONS * len(STAGES) - committed
    # only the piece in progress may be done twice
    assert (killed.stdout + again.stdout).count("piece ") <= ITERATIONS * PIECES + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_anywhere_changes_nothing_in_the_end(tmp_path, forks: Forks):
    (tmp_path / "whole").mkdir()
    whole = forks.run(str(tmp_path / "whole" / "root"), "-1")
    assert whole.returncode == 0, whole.stderr
    expected, calls = identities(tmp_path / "whole"), int(whole.stdout.split()[-1])
    assert len(expected) == ITERATIONS * len(STAGES)

    def kill_at(point):
        folder = tmp_path / str(point)
        rerun_after_kill(forks, folder, point)
        root = open_root(str(folder / "root"))
        assert identities(folder) == expected
        collect(root, WORKFLOW, "run", apply=True, now=LATER)
        assert verify(root, "run").findings == ()
        assert not [key for key in root.keys("") if layout.is_temporary(key)]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(kill_at, range(calls)))


def fork_after_kill(forks: Forks, folder: Path, point: int) -> None:
    """The first process is killed, a cleaner looks, and the second one completes the fork."""
    root = open_root(str(folder / "root"))
    make_run(root, "parent", 1)
    for key in root.keys(""):
        age(root, key)
    killed = forks.run(str(folder / "root"), str(point), "fork")
    assert killed.returncode == -9, killed.stderr
    collect(root, WORKFLOW, "child", apply=True)
    if "child" not in runs(root):
        again = forks.run(str(folder / "root"), "-1", "fork")
        assert again.returncode == 0, again.stderr


def of_child(root: Root) -> list[tuple]:
    return [(one.digest, one.parts, one.origin) for one in contents(root, "child").newest]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_a_fork_that_is_killed_anywhere_is_completed_and_its_parent_stays(tmp_path, forks: Forks, every):
    whole = open_root(str(tmp_path / "whole" / "root"))
    make_run(whole, "parent", 1)
    ended = forks.run(str(whole.folder), "-1", "fork")
    assert ended.returncode == 0, ended.stderr
    calls = int(ended.stdout.split()[-1])

    def kill_at(point):
        folder = tmp_path / str(point)
        fork_after_kill(forks, folder, point)
        root = open_root(str(folder / "root"))
        assert of_child(root) == of_child(whole)
        collect(root, WORKFLOW, "child", apply=True, now=LATER)
        for run in ("parent", "child"):
            assert verify(root, run).findings == ()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(kill_at, range(0, calls, every)))
