"""Each iteration is a subflow run, green once all its results are durable; the task that failed is the red one."""

import io
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect._flow_run_suspension import mark_flow_run_suspension_requested
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import State, StateDetails, StateType, TaskRun
from prefect.exceptions import Pause
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Suspended
from rich.console import Console

from flows.driving import Drive
from flows.subflows import Subflows
from flows.views.progress import Progress
from storage import kill_points, layout
from storage.backends.root import Root
from storage.errors import StorageUnavailable
from storage.kill_points import Point
from storage.manifest import find, need
from storage.write_behind import WriteBehind
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tests.flows.server.link import linked
from tests.small.config import ITERATIONS, small_config
from tests.small.here import WorkersHere

DEADLINE_S = 60.0
PROJECT = Path(__file__).resolve().parents[2]
States = dict[str, str | None]


def drive(
    root: Root,
    scratch: Path,
    at: Callable[[Point, str], None],
    patience_s: float = DEADLINE_S,
    workers: type[WorkersHere] = WorkersHere,
) -> State[Any]:
    """Drive the real loop over small workers, within a flow; its final state."""
    config = small_config()
    scratch.mkdir()

    @contextmanager
    def opener(lease: Any, digest: str) -> Iterator[RunContext]:
        with (
            Subflows("a", ITERATIONS, patience_s=patience_s) as page,
            WriteBehind() as outbox,
            kill_points.observed(at),
        ):
            yield RunContext(
                "a", root, config, digest, workers(config), scratch, lease, outbox,
                page.performer, page=page,
            )  # fmt: skip

    @flow(name="test", persist_result=False)
    def body() -> None:
        Drive("a", root, config, Progress("a", ITERATIONS, Console(file=io.StringIO())), opener).complete()

    return body(return_state=True)


def is_ours(file: str) -> bool:
    return Path(file).is_relative_to(PROJECT) and ".venv" not in file


def found(state: State[Any], wanted: set[str]) -> tuple[States, dict[str, States]]:
    """State names of the subflow runs, and of the task runs in each, once all that are `wanted` or exist have ended."""
    identity, deadline = state.state_details.flow_run_id, time.monotonic() + DEADLINE_S
    assert identity is not None
    with get_client(sync_client=True) as client:
        while True:
            below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[identity]))
            runs = client.read_flow_runs(flow_run_filter=below)
            of_each = {run.name: read_tasks(client, run.id) for run in runs}
            tasks = [one for ones in of_each.values() for one in ones]
            ended = {one.name for one in tasks if one.state is not None and one.state.is_final()}
            if wanted <= ended == {one.name for one in tasks} or time.monotonic() > deadline:
                of_subflows = {name: {one.name: one.state_name for one in ones} for name, ones in of_each.items()}
                return {run.name: run.state_name for run in runs}, of_subflows
            time.sleep(0.2)


def read_tasks(client: SyncPrefectClient, flow_run: UUID | None) -> list[TaskRun]:
    assert flow_run is not None
    return client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])))


@pytest.mark.slow
def test_an_iteration_is_under_way_until_its_state_is_durable(prefect_api: str, root: Root, tmp_path: Path):
    trained, before, stacks = threading.Event(), list[Any](), list[list[str]]()

    class Looking(WorkersHere):
        def trainers(self, *given: Any) -> Any:
            stacks.append([one.name for one in traceback.extract_stack() if is_ours(one.filename)])
            return super().trainers(*given)

    def at(point: Point, key: str) -> None:
        place = layout.place_of(key)
        if point is Point.STARTED and place == (2, Stage.ROLLOUT):
            trained.set()  # the next iteration computes while the state of this one is being stored
        elif point is Point.PARTS_DONE and place == (1, Stage.TRAIN):
            assert trained.wait(DEADLINE_S)
            before.append(find(root, "a", 1, Stage.TRAIN))

    state = drive(root, tmp_path / "scratch", at, workers=Looking)
    assert state.is_completed(), state.message
    assert before == [None]
    stack = next(one for one in stacks if {"iterate", "train"} <= {*one})
    # from the loop's line to the first line of a stage there are four frames of ours
    assert stack[stack.index("iterate") + 1 : stack.index("train")] == ["__call__", "performer", "_perform", "perform"]
    subflows, tasks = found(state, {"store-2", "evaluate-2", "evaluate-1", "store-1"})
    assert subflows == {f"a iteration {number}": "Completed" for number in range(ITERATIONS + 1)}
    assert tasks["a iteration 1"] == {
        "rollout-1": "Completed", "reward-1": "Completed", "train-1": "Computed", "store-1": "Completed",
        "weight-sync-1": "Computed", "evaluate-1": "Computed",
    }  # fmt: skip


def refusing(point: Point, iteration: int, stage: Stage) -> Callable[[Point, str], None]:
    """A store that refuses when that stage comes to that point."""

    def at(now: Point, key: str) -> None:
        if now is point and layout.place_of(key) == (iteration, stage):
            raise StorageUnavailable("the bucket refuses")

    return at


@pytest.mark.slow
def test_what_failed_to_be_stored_is_the_red_one(prefect_api: str, root: Root, tmp_path: Path):
    state = drive(root, tmp_path / "scratch", refusing(Point.PARTS_DONE, 1, Stage.TRAIN))
    assert state.is_failed()
    with pytest.raises(StorageUnavailable, match="the bucket refuses"):
        state.result()
    subflows, tasks = found(state, {"store-1"})
    assert subflows["a iteration 1"] == "Failed"
    colours = {name: colour for ones in tasks.values() for name, colour in ones.items()}
    assert [name for name, colour in colours.items() if colour == "Failed"] == ["store-1"]
    assert "Cancelled" in {*colours.values(), *subflows.values()}  # the stage in which it occurred


@pytest.mark.slow
def test_an_iteration_that_never_began_is_not_shown(prefect_api: str, root: Root, tmp_path: Path):
    """Its subflow run is asked for while the weights of the iteration before it are synced."""
    state = drive(root, tmp_path / "scratch", refusing(Point.STARTED, 0, Stage.EVALUATE))
    assert state.is_failed()
    subflows, tasks = found(state, {"evaluate-0"})
    assert subflows == {"a iteration 0": "Failed"}
    assert tasks["a iteration 0"]["evaluate-0"] == "Failed"
    with get_client(sync_client=True) as client:
        assert len(read_tasks(client, state.state_details.flow_run_id)) == 1  # the one that stands for the subflow


def test_a_suspended_flow_run_ends_after_the_stage_under_way_and_leaves_no_subflow_running(
    prefect_api: str, root: Root, tmp_path: Path
):
    asked: list[UUID] = []

    def at(point: Point, key: str) -> None:
        if point is Point.STARTED and layout.place_of(key) == (1, Stage.ROLLOUT):
            asked.append(UUID(flow_run.get_root_flow_run_id()))
            # as Prefect does in the process of a deployment's flow run, when a person presses Suspend
            mark_flow_run_suspension_requested(asked[0], Suspended())

    with pytest.raises(Pause):
        drive(root, tmp_path / "scratch", at)
    assert need(root, "a", 1, Stage.ROLLOUT)
    assert find(root, "a", 1, Stage.REWARD) is None
    subflows, _ = found(State(type=StateType.PAUSED, state_details=StateDetails(flow_run_id=asked[0])), {"rollout-1"})
    assert subflows["a iteration 1"] == "Cancelled"
    assert {*subflows.values()} <= {"Completed", "Cancelled"}
    assert drive(root, tmp_path / "again", lambda *_: None).is_completed()


@pytest.mark.slow
def test_without_a_server_the_work_goes_on(prefect_api: str, root: Root, tmp_path: Path):
    """The current iteration is reported once the server is back; the run's flow run shows the others."""

    def at(point: Point, key: str) -> None:
        if point is Point.STARTED and layout.place_of(key) == (0, Stage.PREPARE):
            link.cut()
        elif point is Point.STARTED and layout.place_of(key) == (ITERATIONS, Stage.TRAIN):
            link.restore()

    with linked(prefect_api) as link, temporary_settings({PREFECT_API_URL: link.url, PREFECT_CLIENT_MAX_RETRIES: 0}):
        state = drive(root, tmp_path / "scratch", at, patience_s=2.0)
        subflows, _ = found(state, set())
    assert state.is_completed(), state.message
    assert need(root, "a", ITERATIONS, Stage.WEIGHT_SYNC)
    assert subflows == {"a iteration 0": "Completed"}
