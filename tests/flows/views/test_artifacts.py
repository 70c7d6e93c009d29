"""The Prefect flow run carries table, summary and curves."""

import json

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from flows.views.artifacts import publish
from flows.views.curves import data_uri, store_plot
from flows.views.status import read_status
from storage.backends.root import Root
from tests.flows.runs import MakeRun


def test_a_flow_run_carries_table_summary_and_curves(prefect_api: str, make_run: MakeRun, root: Root):
    make_run("a.b", 2)
    png = store_plot(root, "a.b", read_status(root, "a.b").history)

    @flow(name="test", persist_result=False)
    def body() -> None:
        publish(read_status(root, "a.b"), png)

    state = body(return_state=True)
    assert state.is_completed(), state.message
    of_this_flow = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        found = {artifact.key: artifact for artifact in client.read_artifacts(artifact_filter=of_this_flow)}
    assert {key: artifact.type for key, artifact in found.items()} == {
        "ratchet-a-b-iterations": "table",
        "ratchet-a-b-summary": "markdown",
        "ratchet-a-b-curves": "image",
    }
    assert [row["iteration"] for row in json.loads(str(found["ratchet-a-b-iterations"].data))] == [0, 1, 2]
    assert found["ratchet-a-b-curves"].data == data_uri(png)
