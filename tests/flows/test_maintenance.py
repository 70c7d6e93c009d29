"""Upkeep of all runs of a root, over runs that the real loop has made."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from flows.cli.app import execute
from flows.maintenance import OWNER, Upkeep, maintain_root
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.manifest import need
from storage.ownership.lease import hold
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tests.small.config import small_config
from tests.small.driving import driver
from tests.storage.runs import age

ALL = Upkeep()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two complete runs."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("a", "b"):
        driver(open_root(str(folder / "runs")), small_config(), folder / f"scratch-{name}", run=name).drive()
    return folder / "runs"


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Root:
    shutil.copytree(made, tmp_path / "runs")
    return open_root(str(tmp_path / "runs"))


def orphan(root: Root, run: str) -> str:
    """A part that a crash left two days ago in a finished iteration."""
    key = layout.part_key(run, 1, Stage.ROLLOUT, "left.arrow", "0" * 32)
    root.replace(key, b"left by a crash")
    age(root, key)
    return key


def test_everything_is_looked_after_and_a_second_time_finds_nothing_to_do(root: Root):
    left = orphan(root, "a")
    first, second = maintain_root(root, ALL), maintain_root(root, ALL)
    assert [one.run for one in first.runs] == ["a", "b"]
    assert first.healthy
    assert [(one.removed, one.archived > 0, one.verified_bytes > 0) for one in first.runs] == [
        (1, True, True),
        (0, True, True),
    ]
    assert not root.exists(left)
    assert second.healthy
    assert [(one.removed, one.archived) for one in second.runs] == [(0, 0), (0, 0)]


def test_a_damaged_run_does_not_stop_the_others(root: Root):
    part = need(root, "a", 1, Stage.ROLLOUT).parts[0].key
    root.replace(part, b"something else")
    done = maintain_root(root, ALL)
    assert not done.healthy
    damaged, sound = done.runs
    assert any("damaged" in one and part in one for one in damaged.problems)
    assert sound.problems == ()
    assert sound.archived > 0


@pytest.mark.parametrize("key", ["b/run.json", "b/manifests/000001/train.r0.json"])
def test_a_damaged_record_is_named_and_stops_no_other_run(root: Root, key: str):
    root.replace(key, b'{"checksum": "0"}\n')
    first, second = maintain_root(root, ALL).runs
    assert any(key in one for one in second.problems)
    assert not any("not sound" in one for one in first.problems)


def test_a_run_that_is_driven_is_cleaned_beside_the_work(root: Root):
    left = orphan(root, "a")
    waiting = layout.part_key("a", 3, Stage.ROLLOUT, "next.arrow", "0" * 32)
    root.replace(waiting, b"of the iteration in progress")
    age(root, waiting)
    with hold(root, "a", "the driver") as lease:
        done = maintain_root(root, ALL, ["a"])
        lease.check()
    assert done.healthy
    assert [(one.driven, one.removed) for one in done.runs] == [(True, 1)]
    assert not root.exists(left)
    assert root.exists(waiting)


def test_what_is_left_of_a_retired_state_is_deleted_and_no_more_is_retired(root: Root):
    config = small_config(["storage.keep_newest=1"])
    driver(root, config, root.folder.parent / "scratch", run="c").drive()
    part = need(root, "c", 1, Stage.TRAIN).parts[0]
    assert not root.exists(part.key)
    root.replace(part.key, b"what a kill between the record and the deletion leaves")
    assert maintain_root(root, ALL, ["c"]).runs[0].removed == 1
    assert not root.exists(part.key)
    longer = small_config(["storage.keep_newest=20", "run.iterations=4"])
    driver(root, longer, root.folder.parent / "scratch", run="c").drive()
    assert maintain_root(root, ALL, ["c"]).runs[0].removed == 0
    assert verify(root, "c").sound


def test_two_at_once_and_a_run_that_goes_on_meanwhile(root: Root):
    reports, longer = [], small_config(["run.iterations=4"])
    threads = [threading.Thread(target=lambda: reports.append(maintain_root(root, ALL))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.healthy for one in reports] == [True, True]

    def maintained(_record) -> None:
        reports.append(maintain_root(root, ALL))

    driver(root, longer, root.folder.parent / "scratch", run="a", listener=maintained).drive()
    assert all(one.healthy for one in reports)
    assert [one.driven for one in reports[-1].runs] == [True, False]
    assert verify(root, "a").sound
    assert need(root, "a", 4, Stage.WEIGHT_SYNC)


def test_the_lease_says_who_holds_it_while_a_run_is_cleaned(root: Root):
    maintain_root(root, Upkeep(compact=False, verify=False), ["a"])
    assert OWNER in root.read_bytes(root.keys("a/lease")[-1]).decode()


def test_a_run_that_does_not_exist_is_refused(root: Root):
    with pytest.raises(InputError, match="no run 'z'"):
        maintain_root(root, ALL, ["z"])


def test_a_root_without_runs_is_refused_because_its_name_may_be_wrong(tmp_path, capfd):
    for words in (["maintain"], ["verify", "--all"]):
        assert execute([*words, f"--root={tmp_path}/mistyped"]) == InputError.exit_code
        assert f"there are no runs in file://{tmp_path}/mistyped" in capfd.readouterr().err


def test_the_command_says_what_it_did_and_fails_on_a_problem(root: Root, capfd):
    assert execute(["maintain", f"--root={root.url}", "--json"]) == 0
    done = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [one["run"] for one in done["maintenance"]["runs"]] == ["a", "b"]
    root.replace(need(root, "a", 1, Stage.ROLLOUT).parts[0].key, b"something else")
    assert execute(["maintain", "a", f"--root={root.url}"]) == 1
    assert "not sound" in capfd.readouterr().err
    assert execute(["maintain", f"--root={root.url}", "--no-verify", "--no-gc"]) == 0
