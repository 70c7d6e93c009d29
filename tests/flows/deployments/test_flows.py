"""The flows of deployments over small workers, under a real server: overlap, fixed parameters, names, messages."""

import contextvars
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import State

from flows import run
from flows.deployments import attempt
from flows.deployments.runs import complete_iterations, train
from flows.server.temporary import drain
from storage.backends.root import Root
from storage.manifest import need
from tasks.stages.names import Stage
from tests.flows.failures import KINDS, check_explained, check_resumed
from tests.flows.small_context import small_context
from tests.small.config import _DOCUMENT

QUICK = ["evaluate.every=0"]


@pytest.fixture
def given(root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_api: str) -> dict[str, Any]:
    """Parameters of each flow run of `train`."""
    monkeypatch.setattr(run, "open_context", small_context)
    monkeypatch.setattr(attempt, "_LOOK_S", 0.05)
    (tmp_path / "small.toml").write_text(_DOCUMENT)
    return {"root": str(root.folder), "config": str(tmp_path / "small.toml"), "settings": QUICK, "return_state": True}


@pytest.fixture
def client(prefect_api: str):
    with get_client(sync_client=True) as client:
        yield client


def identity(state: State[Any]) -> Any:
    assert state.state_details.flow_run_id is not None
    return state.state_details.flow_run_id


def lines(client: SyncPrefectClient, state: State[Any]) -> list[str]:
    drain()
    found = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[identity(state)])))
    texts = [one.message for one in sorted(found, key=lambda one: one.timestamp)]
    return [text for text in texts if not text.startswith("Beginning flow run")]  # as the process of a worker has it


@pytest.mark.slow
def test_overlapping_flow_runs_each_add_what_they_were_asked_for(given, root: Root, client, tmp_path: Path):
    """Each flow run counts from the iterations that it finds once it has the run; its Retry keeps that count."""
    (tmp_path / "slow-rollout").write_text("0.2")  # the others look meanwhile
    states: list[State[Any]] = []
    contexts = [contextvars.copy_context() for _ in range(3)]  # Prefect finds its server there
    ask = lambda: states.append(train(run="a", more=1, **given))  # noqa: E731
    threads = [threading.Thread(target=context.run, args=(ask,)) for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(state.is_completed() for state in states), states
    assert complete_iterations(root, "a") == 3
    kept = [client.read_flow_run(identity(state)).parameters for state in states]
    assert sorted((one["iterations"], one["more"]) for one in kept) == [(1, None), (2, None), (3, None)]
    assert not [one for one in psutil.Process().children() if "uvicorn" in one.cmdline()]  # a second server
    again = train(run="a", iterations=3, **given)
    assert again.message == "run a has 3 iterations; nothing was to be done"


@pytest.mark.slow
def test_a_failure_is_explained_on_its_page_and_the_log_begins_with_what_is_done(
    given, root: Root, client, tmp_path: Path
):
    (tmp_path / "fail-train").write_text("NumericsError")
    state = train(run="b", more=1, **given)
    assert state.is_failed()
    assert str(state.message).startswith("During train of iteration 1: train does not work here")
    assert lines(client, state)[0].startswith("train run b for 1 more iteration, by ")
    of_this = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[identity(state)]))
    page = next(one for one in client.read_artifacts(artifact_filter=of_this) if one.key == "ratchet-b-failure")
    for words in ("| stage | train of iteration 1 |", "learning rate", "### Last lines", "iteration 0: train"):
        assert words in str(page.data)
    assert f"/artifacts/artifact/{page.id}" in str(state.message)
    assert client.read_flow_run(identity(state)).parameters["iterations"] == 1
    (tmp_path / "fail-train").unlink()
    rollout = need(root, "b", 1, Stage.ROLLOUT)
    assert train(run="b", iterations=1, **given).is_completed()
    following = train(run="b", root=given["root"], more=1, return_state=True)  # as recorded
    assert following.message == "run b has 2 iterations"
    assert need(root, "b", 1, Stage.ROLLOUT) == rollout
    mine = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[identity(state)]))
    assert {one.name for one in client.read_flow_runs(flow_run_filter=mine)} >= {"b iteration 0", "b iteration 1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["engine", "storage"])
def test_another_failure_is_explained_and_what_was_committed_is_kept(given, root: Root, tmp_path: Path, name: str):
    """The browser test of a failing reward is in `tests/flows/site/test_browser.py`."""
    kind = KINDS[name]
    asked = {"run": "a", "iterations": 1, **given, "settings": [*QUICK, *kind.settings]}
    assert train(**{**asked, "iterations": 0}).is_completed()
    kind.breaks(tmp_path)
    made = check_explained(kind, train(**asked), root)
    kind.repairs(tmp_path)
    check_resumed(kind, train(**asked), root, made, tmp_path)


def test_a_secret_in_a_form_is_refused_and_not_shown(given, root: Root, client):
    state = train(**{"run": "d", "more": 1, **given, "settings": ["reward.arguments.api_key=geheim12"]})
    assert state.is_failed()
    assert "env:" in str(state.message)
    said = lines(client, state)
    assert said[0].startswith("train run d for 1 more iteration")
    assert not [text for text in (str(state.message), *said) if "geheim12" in text]
    assert not root.keys("d")


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        ({"settings": ["rollout.promts=3"]}, "promts"),
        ({"root": "runs"}, "give an absolute path"),
        ({"more": None}, "either iterations"),
    ],
)
def test_input_that_cannot_work_changes_nothing(given, root: Root, changed: dict[str, Any], fact: str):
    state = train(**{"run": "c", "more": 1, **given, **changed})
    assert state.is_failed()
    for words in (fact, "Retry alone cannot help", "No stage was begun, and nothing in"):
        assert words in str(state.message)
    assert not root.keys("c")
