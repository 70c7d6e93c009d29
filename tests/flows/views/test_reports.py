"""Reports beside a run over small workers: after any kill each iteration is in them once, and they end nothing."""

import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.driving import rerun
from flows.views import reports
from flows.views.history import read_history
from flows.views.reports import Reports, finish_report
from flows.views.samples import Samples
from flows.views.table import encode
from flows.views.trackers import TrackedRun
from storage import layout
from storage.backends.root import Root
from storage.errors import InputError
from storage.kill_points import Point
from storage.upkeep.redoing import Wanted
from tasks.config.run import RunConfig
from tasks.stages.names import Stage
from tests.flows.views.events import encoded
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, killing

CSV, EVENTS, PLOT = (layout.report_key(RUN, name) for name in (layout.METRICS, layout.EVENTS, "curves.png"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finish the work of a process that is killed: it must not continue beside the next one, in the same process."""
    monkeypatch.setattr(reports, "_INTERRUPTED_SECONDS", 60.0)


def drive(root: Root, scratch: Path, config: RunConfig, said: list[str], publish=(), at=None) -> None:
    with Reports(root, RUN, config, said.append, publish) as made:
        driver(root, config, scratch, listener=made.add, at=at).drive()


def check_files(root: Root) -> None:
    rows = [record.row for record in read_history(root, RUN)]
    assert root.read_bytes(CSV) == encode(rows)
    assert root.read_bytes(EVENTS) == encoded(rows)


def test_a_run_has_its_reports_when_it_ends(root: Root, tmp_path: Path):
    said: list[str] = []
    shown: list[Samples] = []
    drive(root, tmp_path / "scratch", small_config(["report.examples=1"]), said, [shown.append])
    assert said == []
    check_files(root)
    assert root.read_bytes(PLOT).startswith(b"\x89PNG")
    assert [(one.iteration, len(one.samples)) for one in shown] == [(1, 2), (2, 2)]
    assert all(one.response is not None for found in shown for one in found.samples)


@pytest.mark.slow
def test_an_iteration_that_is_done_again_takes_the_place_of_the_first(root: Root, tmp_path: Path):
    said: list[str] = []
    drive(root, tmp_path / "scratch", small_config(), said)
    before, called = root.read_bytes(CSV), TrackedRun(root, RUN, "wandb")
    assert called.identity
    rerun(root, RUN, Wanted(1, Stage.ROLLOUT, "a test", "tests", new_seeds=True))
    drive(root, tmp_path / "scratch", small_config(), said)
    assert said == []
    assert root.read_bytes(CSV) != before
    check_files(root)
    # a tracker keeps the rows that it was sent: the revision is another run
    replaced = TrackedRun(root, RUN, "wandb")
    assert (called.title, replaced.title) == ("small", "small, revision 1")
    assert replaced.identity != called.identity


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "iteration", "damage"),
    [
        (Stage.EVALUATE, 0, "none"),
        (Stage.ROLLOUT, 1, "torn"),
        (Stage.WEIGHT_SYNC, 1, "gone"),
        (Stage.REWARD, 2, "none"),
        (Stage.REWARD, 2, "doubled"),
    ],
)
def test_an_iteration_is_in_the_files_once_whatever_was_killed(root, tmp_path, stage, iteration, damage):
    said: list[str] = []
    with pytest.raises(Killed):
        drive(root, tmp_path / "first", small_config(), said, at=killing(stage, iteration, Point.STARTED))
    for key in (CSV, EVENTS):
        data = root.read_bytes(key) if root.exists(key) else b""
        if damage == "torn" and data:
            root.replace(key, data[:-5])
        elif damage == "gone":
            root.remove(key)
        elif damage == "doubled":
            root.replace(key, data + data)
    drive(root, tmp_path / "second", small_config(), said)
    assert said == []
    check_files(root)


def test_an_evaluation_that_is_done_later_is_in_the_row(root, tmp_path):
    drive(root, tmp_path / "first", small_config(["evaluate.every=0"]), [])
    assert b"evaluate/reward_mean" not in root.read_bytes(CSV)
    drive(root, tmp_path / "second", small_config(["evaluate.every=1"]), [])
    assert b"evaluate/reward_mean" in root.read_bytes(CSV)
    check_files(root)


def test_a_report_that_fails_is_said_once_and_ends_nothing(root, tmp_path):
    said: list[str] = []

    def broken(_found: Samples) -> None:
        raise SystemExit("the server said\nno")

    drive(root, tmp_path / "scratch", small_config(), said, [broken])
    (text,) = said
    assert text.startswith("examples: SystemExit: the server said (test_reports.py, line ")
    check_files(root)


def test_a_report_that_hangs_does_not_hold_up_the_end(root, tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "_LINGER_SECONDS", 0.2)
    said: list[str] = []
    release = threading.Event()
    drive(root, tmp_path / "scratch", small_config(), said, [lambda _found: release.wait(60)])
    release.set()
    text = "examples: it has not finished in time. The run goes on; later attempts are not reported"
    assert said.count(text) == 1


@pytest.mark.slow
def test_mlflow_continues_the_same_run(root, tmp_path):
    database = tmp_path / "mlflow.db"
    config, said = small_config([f"report.mlflow=sqlite:///{database}"]), []
    with pytest.raises(Killed):
        drive(root, tmp_path / "first", config, said, at=killing(Stage.REWARD, 2, Point.STARTED))
    drive(root, tmp_path / "second", config, said)
    assert said == []
    with sqlite3.connect(database) as connection:
        assert connection.execute("select name, status from runs").fetchall() == [(RUN, "FINISHED")]
        steps = connection.execute("select step from metrics where key = 'train/loss' order by step").fetchall()
        parameters = dict(connection.execute("select key, value from params").fetchall())
    assert steps == [(0,), (1,), (2,)]
    assert parameters["rollout.samples"] == "2"


@pytest.mark.slow
def test_what_a_tracker_lacks_at_the_end_is_sent_when_the_complete_run_is_started_again(root, tmp_path):
    database = tmp_path / "mlflow.db"
    config, said = small_config([f"report.mlflow=sqlite:///{database}"]), []
    drive(root, tmp_path / "scratch", small_config(), said)  # as if the process had died before it told the tracker
    for _ in range(2):
        finish_report(root, RUN, config, said.append)
    assert said == []
    with sqlite3.connect(database) as connection:
        assert connection.execute("select name, status from runs").fetchall() == [(RUN, "FINISHED")]
        steps = connection.execute("select step from metrics where key = 'train/loss' order by step").fetchall()
    assert steps == [(0,), (1,), (2,)]


@pytest.mark.slow
def test_a_tracker_that_refuses_is_said_once(root, tmp_path):
    said: list[str] = []
    drive(root, tmp_path / "scratch", small_config(["report.mlflow=nowhere://x"]), said)
    assert len(said) == 1
    assert said[0].startswith("mlflow: ")
    check_files(root)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of seven bytes."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


def written_by_wandb(folder):
    """Project, id and name of the runs in wandb's offline files, and the steps of their histories."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids, steps = set(), []
    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        for data in wandb_records(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add((record.run.project, record.run.run_id, record.run.display_name))
            if record.HasField("history"):
                steps.append(record.history.step.num)
    return ids, steps


@pytest.mark.slow
def test_wandb_continues_the_same_run_without_a_network(root, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    config, said = small_config(["report.wandb=my-project"]), []
    with pytest.raises(Killed):
        drive(root, tmp_path / "first", config, said, at=killing(Stage.REWARD, 2, Point.STARTED))
    time.sleep(1.1)  # the folder of a run is named by the second
    drive(root, tmp_path / "second", config, said)
    assert said == []
    ids, steps = written_by_wandb(tmp_path / "wandb")
    for _ in range(300):  # its own process may still be writing when a run is finished
        if len(steps) == 3:
            break
        time.sleep(0.1)
        ids, steps = written_by_wandb(tmp_path / "wandb")
    assert len(ids) == 1
    assert {(project, name) for project, _, name in ids} == {("my-project", RUN)}
    assert steps == [0, 1, 2]


@pytest.mark.parametrize(
    ("setting", "fact"),
    [
        ("report.mlflow=https://u:pw@host", "report.mlflow: it is a URL with credentials"),
        ("report.examples=-1", "report.examples"),
    ],
)
def test_what_cannot_be_reported_to_is_refused(setting, fact):
    with pytest.raises(InputError, match=fact):
        small_config([setting])
