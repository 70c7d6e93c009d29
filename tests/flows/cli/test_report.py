"""`ratchet report` makes the files of a run again and prints their places."""

import json

import pytest

from flows.cli.app import execute
from flows.views.history import read_history
from flows.views.table import decode
from storage.backends.root import Root
from tests.flows.runs import MakeRun


def test_the_files_are_where_it_says(make_run: MakeRun, root: Root, capfd: pytest.CaptureFixture[str]):
    make_run("a", 2)
    assert execute(["report", "a", "--root", root.url, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert all(document[key].startswith(f"{root.url}/a/report/") for key in ("metrics", "tensorboard", "plot"))
    there = set(root.keys("a/report"))
    assert document["plot"].removeprefix(f"{root.url}/") in there
    assert any(key.startswith(f"{document['tensorboard'].removeprefix(root.url + '/')}/events.out.") for key in there)
    rows = decode(root.read_bytes(document["metrics"].removeprefix(f"{root.url}/")))
    assert rows == [record.row for record in read_history(root, "a")]
    assert execute(["report", "b", "--root", root.url]) == 2
    assert "no run 'b'" in capfd.readouterr().err
