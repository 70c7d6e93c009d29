"""A site as a person has it: server, worker and deployment are real, the computation is small."""

import json
from pathlib import Path

import httpx
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling, Scheduled

from storage.backends.root import Root, open_root
from storage.manifest import need
from storage.ownership.lease import hold
from storage.revisions import read_revisions
from tasks.stages.names import Stage
from tests.flows.site.conftest import SiteHere, begun_rollout, command, ended, up
from tests.forked_python import tree
from tests.small.config import small_config
from tests.small.driving import driver

pytestmark = pytest.mark.slow
LOOPBACK = ("127.0.0.1", "::1")


def test_a_second_up_starts_nothing_and_keeps_what_a_person_changed(site: SiteHere, client: SyncPrefectClient):
    before = site.record()
    deployment = client.read_deployment_by_name("train/train")
    made = client.request("POST", "/deployments/{id}/schedules", path_params={"id": deployment.id},
                          json=[{"schedule": {"cron": "0 2 * * *"}, "active": False}]).json()  # fmt: skip
    assert up(site.folder, site.port)["started"] == []
    assert site.record() == before
    after = client.read_deployment_by_name("train/train")
    assert after.id == deployment.id
    assert [str(one.id) for one in after.schedules] == [one["id"] for one in made]


def test_nothing_listens_beyond_the_loopback_interface(site: SiteHere):
    listening = {}
    for role in ("server", "worker"):
        for one in tree(psutil.Process(site.process(role))):
            listening[role] = {
                found.laddr for found in one.net_connections("inet") if found.status == psutil.CONN_LISTEN
            } | listening.get(role, set())
    assert {(place.ip, place.port) for place in listening["server"]} == {("127.0.0.1", site.port)}
    assert {place.ip for places in listening.values() for place in places} <= set(LOOPBACK)


def test_without_the_secret_nothing_is_read_and_a_page_of_another_site_changes_nothing(site: SiteHere):
    def ask(method: str, path: str, auth: tuple[str, str] | None = None) -> int:
        return httpx.request(method, f"{site.api}{path}", auth=auth, json={}).status_code

    user, _, password = site.secret.partition(":")
    assert ask("GET", "/admin/version") == httpx.codes.UNAUTHORIZED
    assert ask("GET", "/admin/version", (user, "guess")) == httpx.codes.UNAUTHORIZED
    assert ask("GET", "/admin/version", (user, password)) == httpx.codes.OK
    assert ask("POST", "/flow_runs/filter", (user, password)) == httpx.codes.FORBIDDEN  # no CSRF token
    for file in ("secret", "client.env", "site.json", "server.log", "worker.log"):
        assert (site.folder / file).stat().st_mode & 0o077 == 0, file
    assert site.folder.stat().st_mode & 0o077 == 0


def done_here(root: str, run: str, iterations: int) -> Root:
    """The root, in which this process has completed a run or what was left of it."""
    config = small_config([f"run.iterations={iterations}"])
    driver(open_root(root), config, Path(root).parent / "scratch", run=run).drive()
    return open_root(root)


def test_a_finished_stage_is_done_again_once_however_often_it_is_retried(site, client, root: str, tmp_path: Path):
    """A flow run whose run another process drives leaves it alone."""
    store, deployment = done_here(root, "h", 2), client.read_deployment_by_name("rerun-stage/rerun-stage")
    first = {n: need(store, "h", n, Stage.WEIGHT_SYNC) for n in (1, 2)}
    wanted = {"run": "h", "root": root, "iteration": 1, "stage": "rollout", "new_seeds": True}
    with hold(store, "h", "a person's command"):
        flow_run = client.create_flow_run_from_deployment(deployment.id, parameters={**wanted, "reason": "waits"})
        waited = ended(site, client, flow_run).state
    assert (waited.type, "a person's command" in waited.message) == (StateType.CANCELLED, True)
    (tmp_path / "fail-train").write_text("NumericsError")  # after the choice, in the cascade
    flow_run = client.create_flow_run_from_deployment(deployment.id, parameters={**wanted, "reason": "odd samples"})
    failed = ended(site, client, flow_run)
    assert "train does not work here" in failed.state.message
    assert failed.name == "h@1:rollout again"
    (tmp_path / "fail-train").unlink()
    client.set_flow_run_state(flow_run.id, Scheduled(name="AwaitingRetry", message="Retry from the UI"))
    again = ended(site, client, flow_run, attempt=2)
    assert again.state.is_completed(), again.state.message
    assert "rollout of iteration 1 was done again; revision 1 is the head" in again.state.message
    revisions = read_revisions(store, "h")
    assert [(one.reason, one.request) for one in revisions.reruns] == [("odd samples", str(flow_run.id))]
    for n in (1, 2):
        assert need(store, "h", n, Stage.WEIGHT_SYNC).revision == 1
        assert need(store, "h", n, Stage.WEIGHT_SYNC, revisions.seen(0)) == first[n]


def test_a_cancelled_flow_run_ends_with_its_processes_and_its_run_can_be_continued(start, site, client, config, root):
    flow_run = begun_rollout(start, config, root, "f")
    (process,) = psutil.Process(site.process("worker")).children()
    processes = tree(process)
    client.set_flow_run_state(flow_run.id, Cancelling())
    assert ended(site, client, flow_run).state.type is StateType.CANCELLED
    assert not [one for one in processes if one.is_running()]
    assert need(done_here(root, "f", 1), "f", 1, Stage.TRAIN)


def test_a_retraining_of_the_last_day_is_retried_as_it_was_begun(site, client, root, tmp_path: Path):
    done_here(root, "g", 1)
    (tmp_path / "fail-train").write_text("NumericsError")
    deployment = client.read_deployment_by_name("retrain/retrain")
    given = {"run": "night-{date}", "root": root, "start": "g", "select": ["g"], "newer_than": "24h", "samples": 6}
    flow_run = client.create_flow_run_from_deployment(deployment.id, parameters=given)
    failed = ended(site, client, flow_run)
    assert failed.state.type is StateType.FAILED, failed.state
    assert "train does not work here" in failed.state.message
    kept = client.read_flow_run(flow_run.id).parameters
    assert (kept["start"], kept["newer_than"], "{" in kept["run"]) == ("g@1", None, False)
    selection = need(open_root(root), kept["run"], 0, Stage.SELECT)
    (tmp_path / "fail-train").unlink()
    client.set_flow_run_state(flow_run.id, Scheduled(name="AwaitingRetry"))
    done = ended(site, client, flow_run, attempt=2)
    assert done.state.is_completed(), done.state
    assert done.state.message == f"run {kept['run']} has 2 iterations"
    assert need(open_root(root), kept["run"], 0, Stage.SELECT) == selection


@pytest.mark.parametrize("deployment", ["train", "retrain"])
def test_the_form_describes_every_field(client: SyncPrefectClient, deployment: str):
    schema = client.read_deployment_by_name(f"{deployment}/{deployment}").parameter_openapi_schema
    assert schema is not None
    for name, field in schema["properties"].items():
        assert field.get("title"), name
        assert field.get("description"), name
    assert set(schema["required"]) == {"run", "root"}


def test_down_ends_what_was_started_and_nothing_else(python: None, tmp_path: Path):
    (tmp_path / "site").mkdir(mode=0o700)
    stranger = psutil.Process()
    earlier = {"role": "server", "process": stranger.pid, "started": "an earlier start", "version": "x"}
    record = {"api": "http://127.0.0.1:1/api", "processes": [earlier]}
    (tmp_path / "site" / "site.json").write_text(json.dumps(record))
    done = command("down", f"--folder={tmp_path / 'site'}")
    assert done.code == 0, done.err
    assert done.json == {"ended": [], "gone": ["server"]}
    assert stranger.is_running()
