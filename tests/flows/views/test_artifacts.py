"""The Prefect flow run carries table, summary and curves."""

import json
import threading

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from flows.views.artifacts import examples_publisher, publish
from flows.views.curves import data_uri, store_plot
from flows.views.samples import Sample, Samples
from flows.views.status import read_status
from storage.backends.root import Root
from tests.flows.runs import MakeRun


def test_a_flow_run_carries_table_summary_and_curves(prefect_api: str, make_run: MakeRun, root: Root):
    make_run("a.b", 2)
    sample = Sample(
        prompt_id="p", sample_id=1, prompt="1+1=", response="x" * 3000, reward=0.5, components={"right": 1.0},
        status="ok", detail=None, advantage=-1.0, finish_reason="stop", tokens=3, weight_versions=(1,),
    )  # fmt: skip
    shown = Samples(root=root.url, run="a.b", iteration=2, total=8, samples=(sample,))
    png = store_plot(root, "a.b", [record.row for record in read_status(root, "a.b").history])

    @flow(name="test", persist_result=False)
    def body() -> None:
        publish(read_status(root, "a.b"), png)
        show = examples_publisher("a.b")
        earlier = shown.model_copy(update={"iteration": 1})
        thread = threading.Thread(target=lambda: [show(one) for one in (earlier, shown)])
        thread.start()
        thread.join()

    state = body(return_state=True)
    assert state.is_completed(), state.message
    of_this_flow = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(artifact_filter=of_this_flow)
    found = {artifact.key: artifact for artifact in artifacts}
    assert len(found) == len(artifacts)  # showing it again changes the artifact in place
    assert {key: artifact.type for key, artifact in found.items()} == {
        "ratchet-a-b-iterations": "table",
        "ratchet-a-b-summary": "markdown",
        "ratchet-a-b-curves": "image",
        "ratchet-a-b-samples": "table",
    }
    (row,) = json.loads(str(found["ratchet-a-b-samples"].data))
    assert (row["iteration"], row["sample"], row["components"], row["advantage"]) == (2, "p/1", "right 1.0", -1.0)
    assert row["response"].endswith("x... (3000 characters)")
    assert [row["iteration"] for row in json.loads(str(found["ratchet-a-b-iterations"].data))] == [0, 1, 2]
    assert found["ratchet-a-b-curves"].data == data_uri(png)
