"""The deployment `evaluate`, over small workers under a real server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import State

from flows import evaluating
from flows.deployments.stored import evaluate
from flows.views.evaluations import evaluations
from storage.backends.root import Root
from tasks.stages.context import RunContext
from tests.small.config import small_config
from tests.small.driving import RUN, driver
from tests.small.here import WorkersHere


@pytest.fixture
def evaluated(root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A run, and evaluations of it in this process."""
    driver(root, small_config(["evaluate.pass=reward >= 0.01"]), tmp_path / "scratch").drive()

    @contextmanager
    def here(run: str, root: Root, stored: Any) -> Iterator[RunContext]:
        folder = tmp_path / "evaluation"
        folder.mkdir(exist_ok=True)
        yield RunContext(run, root, stored.config, stored.digest, WorkersHere(stored.config), folder)

    monkeypatch.setattr(evaluating, "open_evaluation", here)
    return root


def asked(root: Root, **more: Any) -> State[Any]:
    return evaluate(run=RUN, root=str(root.folder), samples=2, return_state=True, **more)


@pytest.mark.slow
def test_the_table_has_the_change_since_the_last_evaluation(prefect_api: str, evaluated: Root):
    for iteration in ("1", "best", "last"):
        state = asked(evaluated, iteration=iteration)
        assert state.is_completed(), state.message
        with get_client(sync_client=True) as client:  # a Retry repeats the same evaluation
            assert client.read_flow_run(state.state_details.flow_run_id).parameters["iteration"].isdigit()
    of_this = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        (artifact,) = client.read_artifacts(artifact_filter=of_this)
    rows = {row["figure"]: row for row in json.loads(str(artifact.data))}
    last = evaluations(evaluated, RUN)[-1]
    assert {"greedy/pass@1", "greedy/reward", "sampled/pass@1", "sampled/pass@2", "sampled/errors"} <= rows.keys()
    assert rows["sampled/reward"]["change"] == pytest.approx(last.change["sampled/reward"], abs=1e-6)
    assert artifact.key == f"ratchet-{RUN}-evaluation"
    assert last.iteration == 2
    assert f"change since iteration {last.before}" in str(artifact.description)


def test_what_cannot_be_evaluated_is_said(prefect_api: str, evaluated: Root):
    state = asked(evaluated, iteration="9")
    assert state.is_failed()
    assert "iteration 9 of run 'small' is not there" in str(state.message)
