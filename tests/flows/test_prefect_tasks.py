"""The stage tasks under a real Prefect server; the stages' bodies are stand-ins, since only their order is at stake."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import TaskRun

from storage.errors import InputError
from storage.manifest import Manifest
from tasks.stages.names import Stage
from tasks.stages.prefect_tasks import REUSED, StageTask
from tasks.stages.stage import StageResult
from tests.flows.runs import make_manifest

DEADLINE_S = 60.0


class Context:
    """What a run's context is to Prefect: something that it must not look into."""

    def __hash__(self) -> int:
        raise AssertionError("the context was hashed")

    def __reduce__(self) -> Any:
        raise AssertionError("the context was serialised")


def returning(stage: Stage, reused: Callable[[int], bool], calls: list[int]) -> StageTask:
    def body(_context: Context, iteration: int, *_inputs: Manifest) -> StageResult:
        calls.append(iteration)
        return StageResult(make_manifest("a", iteration, stage), reused(iteration))

    return StageTask(stage, body)


def task_runs(flow_run_id: Any, expected: int) -> dict[str, TaskRun]:
    """Task runs of a flow run by name; their states reach the server a moment after the flow has ended."""
    deadline = time.monotonic() + DEADLINE_S
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        while True:
            runs = client.read_task_runs(flow_run_filter=chosen)
            ended = [run for run in runs if run.state is not None and run.state.is_final()]
            if len(ended) == expected or time.monotonic() > deadline:
                return {run.name: run for run in ended}
            time.sleep(0.2)


def run_flow(body: Callable[[], Any]) -> Any:
    return flow(name="test", persist_result=False)(body)(return_state=True)


def test_a_stage_ends_as_completed_or_as_reused(prefect_api: str):
    rollout = returning(Stage.ROLLOUT, lambda iteration: iteration == 2, [])

    def body() -> None:
        for iteration in (1, 2, 3):
            assert rollout(Context(), iteration).iteration == iteration

    state = run_flow(body)
    assert state.is_completed(), state.message
    runs = task_runs(state.state_details.flow_run_id, 3)
    assert {name: run.state_name for name, run in runs.items()} == {
        "rollout-1": "Completed",
        "rollout-2": REUSED,
        "rollout-3": "Completed",
    }
    assert all(run.state is not None and run.state.is_completed() for run in runs.values())
    assert not {tag for run in runs.values() for tag in run.tags}


def test_nothing_comes_from_a_cache(prefect_api: str, prefect_home: Path):
    calls: list[int] = []
    rollout = returning(Stage.ROLLOUT, lambda _: False, calls)

    def body() -> None:
        for _ in range(3):
            rollout(Context(), 1)

    for _ in range(2):
        state = run_flow(body)
    assert calls == [1] * 6
    runs = task_runs(state.state_details.flow_run_id, 3)
    assert [run.state_name for run in runs.values()] == ["Completed"] * len(runs)
    assert not list((prefect_home / "storage").glob("*"))


def test_the_graph_of_a_flow_run_follows_the_manifests(prefect_api: str):
    rollout, reward = (returning(stage, lambda _: False, []) for stage in (Stage.ROLLOUT, Stage.REWARD))

    def body() -> None:
        reward(Context(), 1, rollout(Context(), 1))

    runs = task_runs(run_flow(body).state_details.flow_run_id, 2)
    assert [source.id for source in runs["reward-1"].task_inputs["inputs"]] == [runs["rollout-1"].id]


def test_a_failure_reaches_the_caller_as_it_was_raised(prefect_api: str):
    def refuse(_context: Context, _iteration: int) -> StageResult:
        raise InputError("the data set is empty")

    train = StageTask(Stage.TRAIN, refuse)

    def body() -> None:
        train(Context(), 4)

    state = run_flow(body)
    assert state.is_failed()
    with pytest.raises(InputError, match="the data set is empty"):
        state.result()
    assert task_runs(state.state_details.flow_run_id, 1)["train-4"].state_name == "Failed"
