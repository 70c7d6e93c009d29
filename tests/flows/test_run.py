"""The flow is complete in itself: every kind of start checks first and records its configuration."""

import os
from pathlib import Path

import pytest

from flows.run import ready, run
from storage.backends.root import open_root
from storage.errors import InputError, LeaseHeld, StorageUnavailable
from storage.ownership.lease import hold
from tests.small.config import small_config
from tests.small.driving import driver


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (["train.parallel.pipeline=3"], "cannot be divided by train.parallel.pipeline = 3"),
        (["reward.function=no_such_reward"], "'no_such_reward' is unknown"),
        (["device.kind=cuda"], "no GPU is visible"),
    ],
)
def test_the_flow_itself_refuses_what_cannot_work_and_leaves_nothing(settings, fact, tmp_path: Path):
    root = str(tmp_path / "runs")
    with pytest.raises(InputError, match=fact):
        run.fn("a", root, small_config(settings))
    assert open_root(root).folders() == []


def test_the_flow_itself_refuses_a_root_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable):
        run.fn("a", str(tmp_path / "file"), small_config())


@pytest.mark.parametrize("name", ["Upper", "a/b", "", "../a"])
def test_a_run_needs_a_usable_id(tmp_path: Path, name: str):
    with pytest.raises(InputError, match="run name"):
        ready(name, str(tmp_path / "runs"), small_config())


def test_a_run_keeps_its_configuration_and_refuses_another_meaning(tmp_path: Path):
    url, config = str(tmp_path / "runs"), small_config()
    root = ready("first", url, config)
    assert root.folders() == []
    driver(root, config, tmp_path / "scratch", run="first").drive()
    ready("first", url, small_config(["engine.count=2", "run.iterations=7"]))
    with pytest.raises(InputError, match=r"run\.seed: the run was started with 0, but is now given 4"):
        ready("first", url, small_config(["run.seed=4"]))


def test_an_input_error_makes_no_folder(tmp_path: Path):
    with pytest.raises(InputError, match="no_such_reward"):
        ready("a", str(tmp_path / "x" / "runs"), small_config(["reward.function=no_such_reward"]))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_driven_is_refused_before_anything_starts(tmp_path: Path):
    root = ready("a", str(tmp_path / "runs"), small_config())
    with hold(root, "a", "ratchet run"), pytest.raises(LeaseHeld, match="which is alive"):
        ready("a", root.url, small_config())


def test_the_process_is_set_up_by_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    ready("a", str(tmp_path / "runs"), small_config())
    assert os.environ["HF_HUB_OFFLINE"] == "1"
