"""The plot, the table and the summary are made from the history alone."""

import base64
import re
import struct

import pytest

from flows.views.artifacts import artifact_key, iteration_table, summary
from flows.views.curves import PIXELS, data_uri, store_plot
from flows.views.history import PLOT, read_history
from flows.views.status import read_status
from flows.views.table import Row
from storage import layout
from storage.backends.root import Root
from tasks.stages.names import Stage
from tests.flows.runs import MakeRun


def png_size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def rows_of(root: Root) -> list[Row]:
    return [record.row for record in read_history(root, "a")]


@pytest.mark.parametrize("complete", [-1, 0, 3], ids=["nothing", "prepared", "three iterations"])
def test_the_plot_is_a_png_of_the_right_size(make_run: MakeRun, root: Root, complete: int):
    make_run("a", complete, (Stage.ROLLOUT,) if complete > 0 else ())
    png = store_plot(root, "a", rows_of(root))
    assert png_size(png) == PIXELS
    assert root.read_bytes(layout.report_key("a", PLOT)) == png


def test_a_plot_is_drawn_anew_when_the_run_has_gone_on(make_run: MakeRun, root: Root):
    make_run("a", 1)
    before = store_plot(root, "a", rows_of(root))
    make_run("a", 3)
    after = store_plot(root, "a", rows_of(root))
    assert after != before
    assert root.read_bytes(layout.report_key("a", PLOT)) == after


def test_the_data_uri_holds_the_png(make_run: MakeRun, root: Root):
    make_run("a", 1)
    png = store_plot(root, "a", rows_of(root))
    head, _, body = data_uri(png).partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(body) == png


@pytest.mark.parametrize("run", ["demo-20261120-190512-ab12", "a", "x.y_z", "0.-_"])
def test_artifact_keys_are_what_prefect_takes(run: str):
    assert re.fullmatch("[a-z0-9-]+", artifact_key(run, "curves"))


def test_the_table_has_a_row_for_each_iteration(make_run: MakeRun, root: Root):
    make_run("a", 2)
    rows = iteration_table(read_history(root, "a"), root.url, "a")
    assert [(row["iteration"], row["reward"], row["held-out reward"]) for row in rows] == [
        (0, None, 0.5),
        (1, 0.5, 1.0),
        (2, 0.75, 1.5),
    ]


def test_the_summary_has_first_and_last(make_run: MakeRun, root: Root):
    make_run("a", 2)
    text = summary(read_status(root, "a"))
    assert "| mean reward | 0.5 -> 0.75 |" in text
    assert f"`{root.url}/a`" in text
