"""The table of metrics: made from manifests alone, the same bytes whether written at once or line by line."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from flows.views import table
from flows.views.events import TensorBoard, record_of
from flows.views.history import read_history
from flows.views.reports import write_report
from flows.views.table import GrowingFile, MetricsFile, Row, decode, encode, row_of, warmup_csv
from flows.views.trackers import TrackedRun
from storage import layout
from storage.backends.root import Root, open_root
from tasks.stages.names import Stage
from tests.flows.runs import MakeRun, make_manifest
from tests.flows.views.events import encoded, parsed
from tests.storage.conftest import EXAMPLE

CSV, EVENTS = layout.report_key("a", layout.METRICS), layout.report_key("a", layout.EVENTS)


@pytest.fixture(params=["file", "sqlite"])
def any_root(request, tmp_path) -> Iterator[Root]:
    url = str(tmp_path / "runs") if request.param == "file" else f"{EXAMPLE}://{tmp_path}/runs.db"
    yield open_root(url)


def rows_of(*columns: tuple[str, ...]) -> list[Row]:
    """A row with each of these columns; the values are odd on purpose."""
    return [
        Row(
            iteration=number,
            finished=datetime(2026, 1, 1, 12, number, 7, 123456, UTC),
            values={"seconds": 0.1 + number, **dict.fromkeys(sorted(names, key=table._place), 1 / (3 + number))},
        )
        for number, names in enumerate(columns)
    ]


ROWS = rows_of(
    ("train/loss",), ("rollout/tokens", "train/loss"), ("rollout/tokens",), ("evaluate/accuracy", "train/loss")
)


def test_a_row_has_the_metrics_of_every_stage():
    scored = make_manifest("a", 2, Stage.REWARD)
    scored = scored.model_copy(
        update={
            "metrics": {"reward_mean": 0.5, "reward/right": 0.25, "errors": 2.0, "reward/errors": 0.5, "odd": math.nan}
        }
    )
    row = row_of([make_manifest("a", 2, Stage.ROLLOUT), scored], 7.5)
    assert row.values == {
        "seconds": 7.5,
        "rollout/seconds": 1.0,
        "rollout/tokens": 1920.0,
        "rollout/tokens_per_second": 3000.0,
        "reward/reward_mean": 0.5,
        "reward/right": 0.25,
        "reward/errors": 2.0,
    }
    assert row.finished == scored.finished


def test_the_csv_reads_back_bit_for_bit():
    assert decode(encode(ROWS)) == ROWS
    header = encode(ROWS).decode().splitlines()[0]
    assert header == "iteration,finished,seconds,rollout/tokens,train/loss,evaluate/accuracy"


@pytest.mark.parametrize("data", [b"", b"other,columns\n1,2\n", b"\xff\xfe", b"iteration,finished"])
def test_what_is_no_table_has_no_rows(data):
    assert decode(data) == []


def test_events_are_those_of_tensorboard():
    opening, *found = parsed(encoded(ROWS))
    assert opening.file_version == "brain.Event:2"
    assert [event.step for event in found] == [0, 1, 2, 3]
    for row, event in zip(ROWS, found, strict=True):
        assert event.wall_time == row.finished.timestamp()
        assert {one.tag: one.simple_value for one in event.summary.value} == pytest.approx(row.values, rel=1e-6)
    huge = Row(iteration=300, finished=ROWS[0].finished, values={"a": 1e300})
    (event,) = parsed(record_of(huge))
    assert (event.step, event.summary.value[0].simple_value) == (300, pytest.approx(3.4028235e38))


def begun(root: Root) -> TensorBoard:
    recorded = TensorBoard(root, "a")
    assert recorded.begin(TrackedRun(root, "a", "tensorboard")) == 0
    return recorded


def test_line_by_line_is_the_same_as_at_once(any_root):
    written, recorded = MetricsFile(any_root, "a"), begun(any_root)
    assert written.load(0) == []
    for row in ROWS:
        written.add(row)
        recorded.log(row)
    written.flush()
    recorded.end(complete=True)
    assert any_root.read_bytes(CSV) == encode(ROWS)
    assert any_root.read_bytes(EVENTS) == encoded(ROWS)


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_torn_end_is_repaired(any_root, cut):
    any_root.replace(CSV, encode(ROWS)[:-cut])
    any_root.replace(EVENTS, encoded(ROWS)[:-cut])
    written, recorded = MetricsFile(any_root, "a"), begun(any_root)
    rows = written.load(4)
    assert rows == ROWS[:3]
    written.add(ROWS[3])
    for row in (*rows, ROWS[3]):
        recorded.log(row)
    written.flush()
    recorded.end(complete=True)
    assert any_root.read_bytes(CSV) == encode(ROWS)
    assert any_root.read_bytes(EVENTS) == encoded(ROWS)


def test_rows_that_are_not_complete_doubled_or_out_of_order_are_dropped(any_root):
    whole = encode(ROWS)
    lines = whole.splitlines(keepends=True)
    any_root.replace(CSV, b"".join([*lines[:3], lines[2], lines[4]]))
    assert MetricsFile(any_root, "a").load(4) == ROWS[:2]
    any_root.replace(CSV, whole)
    assert MetricsFile(any_root, "a").load(1) == ROWS[:1]
    assert any_root.read_bytes(CSV) == encode(ROWS[:1])


def test_a_file_that_cannot_be_appended_to_is_uploaded_from_time_to_time(tmp_path):
    root = open_root(f"{EXAMPLE}://{tmp_path}/runs.db")
    growing = GrowingFile(root, "a/report/x", seconds=1e6)
    for letter in b"abc":
        growing.append(bytes([letter]))
    assert root.read_bytes("a/report/x") == b"a"
    assert growing.read() == b"abc"
    growing.flush()
    assert root.read_bytes("a/report/x") == b"abc"


def test_the_report_is_made_again_from_the_manifests(make_run: MakeRun, root: Root):
    make_run("a", 3)
    rows = [record.row for record in read_history(root, "a")]
    write_report(root, "a")
    assert root.read_bytes(CSV) == encode(rows)
    assert root.read_bytes(EVENTS) == encoded(rows)
    root.append(CSV, b"3,damaged\n")
    root.replace(EVENTS, b"damaged")
    write_report(root, "a")
    assert root.read_bytes(CSV) == encode(rows)
    assert root.read_bytes(EVENTS) == encoded(rows)


def test_losses_of_steps_have_a_file_of_their_own():
    steps = {f"step/{number}": 1 / number for number in range(1, 12)}
    warmed = make_manifest("a", 0, Stage.TRAIN).model_copy(update={"metrics": {"loss": 0.1, **steps, "step/12": None}})
    assert not any("step" in name for name in row_of([warmed], 1.0).values)
    lines = warmup_csv(warmed).decode().splitlines()
    assert lines[:3] == ["step,loss", "1,1.0", "2,0.5"]
    assert lines[-2:] == [f"11,{1 / 11!r}", "12,"]
    assert warmup_csv(make_manifest("a", 0, Stage.TRAIN)) == b"" == warmup_csv(None)


def test_events_of_rows_that_there_are_not_any_more_go(root: Root):
    root.replace(EVENTS, encoded(ROWS))
    recorded = begun(root)
    recorded.log(ROWS[0])
    recorded.end(complete=True)
    assert root.read_bytes(EVENTS) == encoded(ROWS[:1])
