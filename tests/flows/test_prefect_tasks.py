"""The stages as Prefect tasks under a real server; the stages only commit, since only their states matter."""

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import TaskRun

from flows.subflows import REUSED, as_task
from storage.backends.root import Root
from storage.errors import InputError
from tasks.config.run import RunConfig
from tasks.config.stored import ConfigRecord
from tasks.stages.context import RunContext, directly
from tasks.stages.names import Stage
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Rewards, Rollouts, Trained
from tests.small.here import WorkersHere

DEADLINE_S = 60.0


class Untouched(WorkersHere):
    """An object of a context that Prefect must not inspect."""

    def __hash__(self) -> int:
        raise AssertionError("the context was hashed")

    def __reduce__(self) -> Any:
        raise AssertionError("the context was serialised")


@stage(Stage.ROLLOUT, (), Rollouts)
def rollout(work: Work) -> StageOutput:
    return StageOutput()


@stage(Stage.REWARD, ("rollout",), Rewards)
def reward(work: Work, rollouts: Rollouts) -> StageOutput:
    return StageOutput()


@stage(Stage.TRAIN, (), Trained)
def train(work: Work) -> StageOutput:
    raise InputError("the data set is empty")


@pytest.fixture
def context(prefect_api: str, root: Root, config: RunConfig, tmp_path: Path) -> RunContext:
    return RunContext("a", root, config, ConfigRecord.of(config).digest, Untouched(config), tmp_path, performer=as_task)


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


def test_a_stage_ends_as_completed_or_as_reused(context: RunContext):
    rollout(replace(context, performer=directly), 2)

    def body() -> None:
        for iteration in (1, 2, 3):
            assert rollout(context, iteration).manifest.iteration == iteration

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


def test_nothing_comes_from_a_cache(context: RunContext, prefect_home: Path):
    performed: list[int] = []

    @stage(Stage.ROLLOUT, (), Rollouts)
    def counted(work: Work) -> StageOutput:
        performed.append(work.iteration)
        return StageOutput()

    def body() -> None:
        for run in ("a", "b", "c"):  # the same iteration of three runs
            counted(replace(context, run=run), 1)

    state = run_flow(body)
    assert performed == [1] * 3
    runs = task_runs(state.state_details.flow_run_id, 3)
    assert [run.state_name for run in runs.values()] == ["Completed"] * len(runs)
    assert not list((prefect_home / "storage").glob("*"))


def test_the_graph_of_a_flow_run_follows_the_manifests(context: RunContext):
    def body() -> None:
        reward(context, 1, rollout(context, 1))

    runs = task_runs(run_flow(body).state_details.flow_run_id, 2)
    assert [source.id for source in runs["reward-1"].task_inputs["inputs"]] == [runs["rollout-1"].id]


def test_a_failure_reaches_the_caller_as_it_was_raised(context: RunContext):
    def body() -> None:
        train(context, 4)

    state = run_flow(body)
    assert state.is_failed()
    with pytest.raises(InputError, match="the data set is empty") as caught:
        state.result()
    assert task_runs(state.state_details.flow_run_id, 1)["train-4"].state_name == "Failed"
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "train"
