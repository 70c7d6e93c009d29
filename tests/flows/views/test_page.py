"""The page of a flow run during the run, under a real server that is also unreachable for a while."""

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Running

from flows.views.artifacts import WINDOW, LivePage, Shown, _annotate, portion_text
from flows.views.history import read_record
from storage.backends.root import Root
from tasks.stages.context import Portion
from tasks.stages.names import Stage
from tests.flows.runs import MakeRun
from tests.flows.server.link import linked

DEADLINE_S = 60.0
HALF = Portion(3, Stage.ROLLOUT, 48, 96, "samples", 600, 2.0)


def until(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := true()):
        assert time.monotonic() < deadline, "it does not become true"
        time.sleep(0.1)
    return found


def artifacts(flow_run: Any) -> dict[str, Artifact]:
    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=chosen)
    named = {str(one.key): one for one in found}
    assert len(named) == len(found), "an artifact was made twice"
    return named


def this_flow_run() -> Any:
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run.id


def test_one_artifact_shows_the_progress_and_one_the_last_iterations(prefect_api: str, make_run: MakeRun, root: Root):
    make_run("a", 3)

    @flow(name="test", persist_result=False)
    def body() -> Any:
        me = this_flow_run()
        with LivePage("a", root.url, 4, print, every_s=0.1, viewer="http://127.0.0.1:8400") as page:
            page.begins(3, Stage.ROLLOUT)
            until(lambda: "ratchet-a-progress" in artifacts(me))
            page.advanced(HALF)
            shown = until(lambda: (one := artifacts(me)["ratchet-a-progress"]).data == 50.0 and one)
            assert shown.description == "iteration 3 of 4: rollout, 48 of 96 samples, 300 tokens/s"
            for number in range(3):
                page.finished(read_record(root, "a", number))
            until(lambda: "ratchet-a-iterations" in artifacts(me))
            page.finished(read_record(root, "a", 3))
        return me

    found = artifacts(body())
    assert found["ratchet-a-progress"].data == 100.0
    rows = json.loads(str(found["ratchet-a-iterations"].data))
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["manifests"] == f"{root.url}/a/manifests/000003"
    links = str(found["ratchet-a-viewer"].data)
    assert "[Run a in the viewer](http://127.0.0.1:8400/run/a)" in links
    newest = f"| [iteration 3](http://127.0.0.1:8400/run/a/3) | `{root.url}/a/manifests/000003` |"
    assert links.splitlines()[-4] == newest


def test_an_artifact_is_not_made_again_where_only_the_answer_was_lost(prefect_api: str, monkeypatch):
    shown, chosen = Shown("ratchet-lost", "markdown"), ArtifactFilter(key=ArtifactFilterKey(any_=["ratchet-lost"]))
    with get_client(sync_client=True) as client:
        create = client.create_artifact

        def lost(order: Any) -> None:
            create(order)
            raise httpx.ReadTimeout("no answer")

        monkeypatch.setattr(client, "create_artifact", lost)
        with pytest.raises(httpx.ReadTimeout):
            shown.show(client, None, "one", "")
        monkeypatch.undo()
        shown.show(client, None, "two", "")
        assert [one.data for one in client.read_artifacts(artifact_filter=chosen)] == ["two"]


def test_the_table_has_a_window(make_run: MakeRun, root: Root):
    make_run("a", 0)
    page, record = LivePage("a", root.url, 4, print), read_record(root, "a", 0)
    for number in range(WINDOW + 7):
        page.finished(record.model_copy(update={"iteration": number}))
    assert [one.iteration for one in page.window()] == list(range(7, WINDOW + 7))


def test_a_server_that_was_away_is_told_what_it_missed(prefect_api: str, make_run: MakeRun, root: Root):
    make_run("a", 1)
    said: list[str] = []

    @flow(name="test", persist_result=False)
    def body(link: Any) -> Any:
        me = this_flow_run()
        with temporary_settings({PREFECT_API_URL: link.url}):
            page = LivePage("a", root.url, 4, said.append, every_s=0.1)
        with page:
            page.begins(1, Stage.TRAIN)
            until(lambda: "ratchet-a-progress" in artifacts(me))
            link.cut()
            page.begins(1, Stage.WEIGHT_SYNC)
            until(page.is_away)
            page.finished(read_record(root, "a", 1))
            link.restore()
            until(lambda: said)
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(me).state
        return me, state

    with linked(prefect_api) as link:
        me, state = body(link)
    text = str(artifacts(me)["ratchet-a-server-away"].data)
    assert "may be missing" in text
    assert "| 1 | rollout, reward, train, weight-sync, evaluate | 0.5 | 11.0 |" in text
    assert state.is_running()
    assert state.message.startswith("the server was away from")
    assert len(said) == 1


def test_a_flow_run_that_is_cancelled_meanwhile_stays_so(prefect_api: str):
    with get_client(sync_client=True) as client:
        me = client.create_flow_run(flow(lambda: None, name="test"), state=Running()).id
        read_before = client.read_flow_run(me)
        client.set_flow_run_state(me, Cancelling())
        late = SimpleNamespace(read_flow_run=lambda _: read_before, set_flow_run_state=client.set_flow_run_state)
        _annotate(cast(SyncPrefectClient, late), me, "the server was away")
        found = client.read_flow_run(me).state
    assert found is not None
    assert found.is_cancelling()


def test_portions_in_words():
    assert portion_text(Portion(1, Stage.TRAIN, 2, 8, "micro-batches")) == "train, 2 of 8 micro-batches"
