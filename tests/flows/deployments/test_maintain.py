"""Deployment `maintain` under a real server: the content of its page, and the deletion of old flow runs."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, tags, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
)
from prefect.client.schemas.objects import FlowRun

from flows.deployments.stored import maintain
from flows.server.history import TAG, forget_flow_runs
from storage.backends.root import open_root
from storage.manifest import need
from tasks.stages.names import Stage
from tests.small.config import small_config
from tests.small.driving import driver


@task(persist_result=False)
def work() -> int:
    return 1


@flow(persist_result=False)
def inner() -> int:
    return work()


@flow(persist_result=False)
def outer() -> int:
    return inner()


def _subflows(client: SyncPrefectClient, flow_run: Any) -> list[FlowRun]:
    mine = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run]))
    return client.read_flow_runs(flow_run_filter=mine)


@pytest.mark.slow
def test_old_flow_runs_of_the_site_go_with_their_subflows_and_no_others(prefect_api: str):
    with tags(TAG):
        old = outer(return_state=True)
    stranger = outer(return_state=True)
    identities = [one.state_details.flow_run_id for one in (old, stranger)]
    with get_client(sync_client=True) as client:
        assert forget_flow_runs(client, TAG, datetime.now(UTC) - timedelta(days=1)) == 0
        assert forget_flow_runs(client, TAG, datetime.now(UTC) + timedelta(seconds=5)) > 0
        there = {one.id: one for one in client.read_flow_runs()}
        assert identities[0] not in there
        assert identities[1] in there
        assert [len(_subflows(client, one)) for one in identities] == [0, 1]
        assert forget_flow_runs(client, TAG, datetime.now(UTC) + timedelta(seconds=5)) == 0


@pytest.mark.slow
def test_the_page_names_each_run_and_a_problem_makes_the_flow_run_red(prefect_api: str, tmp_path: Path):
    root = open_root(str(tmp_path / "runs"))
    for name in ("a", "b"):
        driver(root, small_config(["run.iterations=1"]), tmp_path / f"scratch-{name}", run=name).drive()
    done = maintain(root=str(root.folder), keep_days=None, return_state=True)
    assert done.is_completed()
    assert done.message == "no problem in 2 runs; all flow runs are kept"
    root.replace(need(root, "b", 1, Stage.ROLLOUT).parts[0].key, b"something else")
    failed = maintain(root=str(root.folder), return_state=True)
    assert failed.is_failed()
    assert "run b: not sound" in (failed.message or "")
    with get_client(sync_client=True) as client:
        like = ArtifactFilter(key=ArtifactFilterKey(like_="%-maintenance"))
        rows = [one.data for one in client.read_artifacts(artifact_filter=like)]
    assert len(rows) == 2
    assert all('"run": "b"' in str(one) for one in rows)


@pytest.mark.parametrize("root", ["runs", "s3://user:geheim@bucket/runs"])
def test_a_root_that_cannot_be_used_is_explained(prefect_api: str, root: str):
    failed = maintain(root=root, return_state=True)
    assert failed.is_failed()
    assert "Retry alone cannot help" in (failed.message or "")
    assert "geheim" not in (failed.message or "")
