"""A site whose flow runs compute with Megatron and vLLM: a person's view when their processes are killed."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType

from flows.proof.faults import Fault, FaultFolder
from flows.views.history import ended_iterations
from storage.backends.root import open_root
from storage.manifest import need
from storage.ownership.lease import check_free
from tasks.stages.names import Stage
from tests.flows.site.conftest import (
    DEADLINE_S,
    PROJECT,
    SiteHere,
    ended,
    faults,
    open_flow_run,
    photograph,
    press_retry,
    text_of,
    wait_for,
)
from tests.forked_python import forked_python, tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TINY = PROJECT / "tests" / "integration" / "tiny.toml"
ITERATIONS = 1000  # more than the run completes before a person on a slow machine has found the button
ENGINE, RANK = "rollout@1:mid-part:engine-0", "train@1:mid-part:trainer-0"


@pytest.fixture(scope="module", autouse=True)
def ranks_and_engines(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let those be forked too."""
    forked_python(tmp_path_factory)


def plan(site: SiteHere, *points: str) -> FaultFolder:
    folder = FaultFolder(faults(site.folder))
    folder.plan([Fault.parse(point) for point in points])
    return folder


@contextmanager
def watched(site: SiteHere) -> Iterator[set[tuple[int, float]]]:
    """Collect every process of a rank or an engine that lives during the block."""
    seen: set[tuple[int, float]] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            seen.update(computing(site))

    thread = threading.Thread(target=look)
    thread.start()
    yield seen
    over.set()
    thread.join()


def computing(site: SiteHere) -> set[tuple[int, float]]:
    """Hosts that Ray has started; a child of one keeps its name until it executes another program."""
    found = set()
    for process in tree(psutil.Process(site.process("worker"))):
        try:
            parent = process.parent()
            if parent is not None and parent.name() == "raylet" and process.name().startswith("ray::Host"):
                found.add((process.pid, process.create_time()))
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_run_whose_engine_and_rank_are_killed(
    site: SiteHere, client: SyncPrefectClient, page, pictures: Path, root: str
):
    """Faults beyond the retries end red, and Retry continues; within, dead processes are replaced. A person cancels."""
    store, real = open_root(root), client.read_deployment_by_name("train/real").id
    beyond = plan(site, "weight-sync@0:sent:engine-0", "weight-sync@0:served:engine-0")
    settings = ["evaluate.every=0", "run.retries=1"]
    given = {"run": "tiny", "root": root, "config": str(TINY), "iterations": ITERATIONS, "settings": settings}
    flow_run = client.create_flow_run_from_deployment(real, parameters=given)
    failed = ended(site, client, flow_run).state
    assert failed.is_failed(), failed
    assert failed.message.startswith("During weight-sync of iteration 0: engine 0"), failed.message
    assert sorted(beyond.delivered(), key=str) == sorted(beyond.planned(), key=str)
    open_flow_run(page, site, flow_run, pictures)
    page.get_by_text("Everything that was committed is kept").first.wait_for()
    photograph(page, pictures / "real-1-red.png")

    within = plan(site, ENGINE, RANK)
    with watched(site) as seen:
        press_retry(page, pictures / "real-2-dialog.png")
        wait_for(lambda: ended_iterations(store, "tiny", ITERATIONS) > 2)
        assert {str(fault) for fault in within.delivered()} >= {ENGINE, RANK}
        assert client.read_flow_run(flow_run.id).run_count == 2
        assert "engine 0 died" in text_of(client, flow_run)
        assert len(seen) == 4, seen  # a rank and an engine, and one more of each: the other survives
        assert need(store, "tiny", 0, Stage.TRAIN).attempt == 0
        assert need(store, "tiny", 0, Stage.WEIGHT_SYNC).attempt == 2

        page.go_back()
        page.get_by_role("button", name="Cancel").first.click()
        page.get_by_role("dialog").get_by_role("button", name="Confirm").wait_for()
        photograph(page, pictures / "cancel-1-dialog.png")
        (process,) = psutil.Process(site.process("worker")).children()
        processes = tree(process)
        clicked = time.monotonic()
        page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
        psutil.wait_procs(processes, timeout=DEADLINE_S)
        (pictures / "cancel.txt").write_text(
            f"from the click to the end of the last process: {time.monotonic() - clicked:.1f} s"
        )
    assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert ended(site, client, flow_run, attempt=2).state.type is StateType.CANCELLED
    assert StateType.CRASHED not in {state.type for state in client.read_flow_run_states(flow_run.id)}
    page.get_by_text("Cancelled").first.wait_for()
    photograph(page, pictures / "cancel-2-cancelled.png")
    check_free(store, "tiny")  # therefore it can be continued
    assert ended_iterations(store, "tiny", ITERATIONS) < ITERATIONS
