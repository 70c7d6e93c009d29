"""Showing a run costs about one request per manifest, not several."""

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from flows.views.history import read_history, read_record
from flows.views.reports import Files
from flows.views.status import read_status
from flows.views.table import decode
from storage import layout
from storage.backends.root import Root
from storage.manifest import Manifest, Part
from storage.revisions import FIRST
from storage.upkeep.catalog import summaries
from storage.upkeep.retention import Retention, catch_up, give_up
from tasks.stages.names import WORKFLOW, Stage
from tests.flows.runs import MakeRun
from tests.storage.s3 import S3Server, s3_server

ITERATIONS = 4
STAGES = 5


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def root(server: S3Server) -> Root:
    server.fail_next([])
    return server.root(uuid.uuid4().hex)


@pytest.fixture
def requests_of(server: S3Server) -> Callable[[Callable[[], object]], list[str]]:
    """Call a function; returns the requests to the server."""

    def count(call: Callable[[], object]) -> list[str]:
        before = len(server.faults.requests)
        call()
        return server.faults.requests[before:]

    return count


def stored(manifest: Manifest) -> dict[str, Any]:
    """More of a manifest: its train state is stored."""
    if manifest.stage != Stage.TRAIN:
        return {}
    digest = "0" * 32
    key = layout.part_key(manifest.run, manifest.iteration, manifest.stage, "weights", digest)
    return {"parts": (Part(name="weights", key=key, bytes=1, digest=digest),)}


def test_a_history_and_a_status_read_each_manifest_once(make_run: MakeRun, root: Root, requests_of):
    make_run("a", ITERATIONS)
    manifests = [key for key in root.keys("a/manifests") if layout.is_manifest(key)]
    asked = requests_of(lambda: read_history(root, "a"))
    assert len(asked) == len(manifests) + 3  # the names of all records, of revisions, and of their copies
    for key in manifests:
        assert sum(key in request for request in asked) == 1
    # the configuration, revisions, which iterations there are, all names again, and whether there is a plot
    assert len(requests_of(lambda: read_status(root, "a"))) <= len(manifests) + 3 + 4


@pytest.mark.slow
def test_a_list_of_runs_reads_the_first_stage_and_the_last_iteration(make_run: MakeRun, root: Root, requests_of):
    for name in "abcd":
        make_run(name, 2)
    # each: is it a run, its names, its revisions and their copies, its manifests, its lease
    assert len(requests_of(lambda: summaries(root))) <= 1 + 4 * (STAGES + 6)


def test_the_end_of_an_iteration_costs_little_more_than_its_manifests(make_run: MakeRun, root: Root, requests_of):
    for name in ("a", "other"):
        make_run(name, ITERATIONS, more=stored)
    assert len(requests_of(lambda: read_record(root, "a", ITERATIONS, FIRST))) == 2 + STAGES + 1
    retire = partial(give_up, root, WORKFLOW, "a", Retention(newest=1), ITERATIONS, revisions=FIRST)
    first = requests_of(retire)
    assert len(first) <= 6  # whether this and the next state are stored; names and parts, the manifest, the record
    assert not any("/other/" in request for request in first)


@pytest.mark.slow
def test_a_row_of_the_report_costs_no_reading(make_run: MakeRun, root: Root, requests_of):
    make_run("a", ITERATIONS)
    rows = [record.row for record in read_history(root, "a")]
    files = Files(root, "a")
    for row in rows[:-1]:
        files.add(row)
    assert requests_of(lambda: files.add(rows[-1])) == []  # uploads and drawings are some seconds apart
    assert len(requests_of(files.flush)) == 3
    assert decode(root.read_bytes(layout.report_key("a", layout.METRICS))) == rows


def test_a_start_costs_few_requests_however_long_the_run_is(make_run: MakeRun, root: Root, requests_of):
    make_run("other", ITERATIONS)
    asked = []
    for name, iterations in (("a", 2), ("b", ITERATIONS)):
        make_run(name, iterations, more=stored)
        catch_up(root, WORKFLOW, name, Retention(newest=1))
        tidy = partial(catch_up, root, WORKFLOW, name, Retention(newest=1), revisions=FIRST)
        asked.append(len(requests_of(tidy)))
    assert asked == [3, 3]  # names, parts, and whether the newest state is stored


@pytest.mark.slow
def test_an_iteration_alone_is_as_in_the_history(make_run: MakeRun, root: Root):
    make_run("a", 3)
    assert [read_record(root, "a", iteration) for iteration in range(4)] == read_history(root, "a")
