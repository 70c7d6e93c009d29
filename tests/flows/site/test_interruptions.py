"""A site and its flow runs when a person ends, kills or restarts parts of it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelling, Scheduled

from flows.views.history import ended_iterations
from storage.backends.root import open_root
from storage.manifest import find, need
from tasks.stages.names import Stage
from tests.flows.site.conftest import (
    DEADLINE_S,
    SMALL,
    SiteHere,
    begin,
    begun_rollout,
    command,
    ended,
    flow_process,
    up,
    wait_for,
    wait_until_idle,
)

pytestmark = pytest.mark.slow


def test_a_flow_run_that_ratchet_stop_ends_is_cancelled_and_not_tried_again(
    start, site: SiteHere, client: SyncPrefectClient, config, root, tmp_path: Path
):
    flow_run = begun_rollout(start, config, root, "b")
    process = flow_process(site)
    stopped = command("stop", "b", f"--root={root}")
    assert stopped.code == 0, stopped.err
    assert stopped.json["process"] == process.pid
    found = ended(site, client, flow_run)
    assert found.state.type is StateType.CANCELLED
    assert "`ratchet stop b` ended it" in found.state.message
    assert not process.is_running()
    (tmp_path / "slow-rollout").unlink()
    names = [state.name for state in client.read_flow_run_states(flow_run.id)]
    assert not {"Crashed", "AwaitingRetry", "AwaitingRetryAfterCrash"} & set(names)
    client.set_flow_run_state(flow_run.id, Scheduled(name="AwaitingRetry"))
    assert ended(site, client, flow_run, attempt=2).state.is_completed()


def test_a_flow_run_that_was_cancelled_and_retried_can_be_cancelled_again(
    start, site: SiteHere, client: SyncPrefectClient, config, root, tmp_path: Path
):
    flow_run = begun_rollout(start, config, root, "g")
    for attempt in (1, 2):
        process = flow_process(site)
        client.set_flow_run_state(flow_run.id, Cancelling())  # as Cancel in the UI does
        found = ended(site, client, flow_run, attempt)
        assert found.state.message == "Flow run was cancelled successfully."
        assert not process.is_running()
        if attempt == 1:
            client.set_flow_run_state(flow_run.id, Scheduled(name="AwaitingRetry"))
            wait_for(lambda: client.read_flow_run(flow_run.id).run_count == 2)
    assert not find(open_root(root), "g", 1, Stage.ROLLOUT)
    (tmp_path / "slow-rollout").unlink()
    client.set_flow_run_state(flow_run.id, Scheduled(name="AwaitingRetry"))
    assert ended(site, client, flow_run, attempt=3).state.is_completed()


@pytest.mark.full  # CI kills the worker of a flow run soon after a restart of the server
def test_a_worker_that_is_killed_is_replaced_and_its_flow_run_goes_on(
    start, site: SiteHere, client, config, root, tmp_path: Path
):
    flow_run = begun_rollout(start, config, root, "c")
    worker, process = psutil.Process(site.process("worker")), flow_process(site)
    worker.kill()
    worker.wait()
    assert up(site.folder, site.port)["started"] == ["worker"]
    (tmp_path / "slow-rollout").unlink()
    done = ended(site, client, flow_run, attempt=2)
    assert done.state.is_completed(), done.state
    assert not process.is_running()
    assert need(open_root(root), "c", 1, Stage.WEIGHT_SYNC)


def test_an_up_that_is_killed_leaves_no_second_worker(site: SiteHere):
    """The command was killed after it had started the worker, and before it recorded that."""
    record = site.record()
    before = psutil.Process(site.process("worker"))
    record["processes"] = [one for one in record["processes"] if one["role"] != "worker"]
    (site.folder / "site.json").write_text(json.dumps(record))
    assert up(site.folder, site.port)["started"] == ["worker"]
    assert not before.is_running()
    assert psutil.pid_exists(site.process("worker"))


def test_down_and_up_let_a_run_go_on_and_a_missed_schedule_fires_once_for_each_time(
    start, site: SiteHere, client, config, root, tmp_path: Path
):
    """The site makes up for flow runs that Prefect had planned before the site went down, each once."""
    flow_run = begun_rollout(start, config, root, "a")  # those that are planned wait for it
    deployment = client.read_deployment_by_name("train/train")
    given = {"run": "e", "root": root, "more": 1, "config": config, "settings": ["evaluate.every=0"]}
    schedule = IntervalSchedule(interval=timedelta(seconds=10), anchor_date=datetime.now(UTC))
    made = DeploymentScheduleCreate(schedule=schedule, active=True, parameters=given)
    (created,) = client.create_deployment_schedules(deployment.id, [made])

    def planned() -> list[FlowRun]:
        found = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=200)
        return [one for one in found if one.auto_scheduled and one.deployment_id == deployment.id and not one.run_count]

    wait_for(lambda: len(planned()) > 2)
    first, second, *_ = planned()
    assert command("down", f"--folder={site.folder}").code == 0
    (tmp_path / "slow-rollout").unlink()
    wait_for(lambda: datetime.now(UTC) > second.expected_start_time)
    assert up(site.folder, site.port)["started"] == ["server", "worker"]
    went_on = ended(site, client, flow_run, attempt=2)
    done = [ended(site, client, missed).state for missed in (first, second)]
    client.delete_deployment_schedule(deployment.id, created.id)
    wait_until_idle(site)
    assert went_on.state.is_completed(), went_on.state
    assert need(open_root(root), "a", 1, Stage.ROLLOUT).attempt == 1
    assert [state.is_completed() for state in done] == [True, True], done
    completed = [one for one in client.read_flow_runs(limit=200) if one.auto_scheduled and one.state.is_completed()]
    assert ended_iterations(open_root(root), "e", 1000) - 1 == len(completed) >= 2
    assert "database is locked" not in (site.folder / "server.log").read_text()


@contextmanager
def staying(site: SiteHere) -> Iterator[None]:
    """`ratchet up --stay` beside the site, as under systemd; it ends the site, and is then started again."""
    options = [f"--folder={site.folder}", f"--port={site.port}", f"--deployments={SMALL}"]
    process = begin("up", "--stay", *options)
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("started"):  # the last line before it stays
            assert process.poll() is None
        yield
        here = [psutil.Process(site.process(role)) for role in ("server", "worker")]
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
        assert not any(one.is_running() for one in here)
    finally:
        process.kill()
        up(site.folder, site.port)


def kill(site: SiteHere, role: str) -> None:
    """Kill the server or the worker, and wait until there is another one."""
    before = site.process(role)
    psutil.Process(before).kill()
    wait_for(lambda: site.process(role) != before and answers(site))


def answers(site: SiteHere) -> bool:
    try:
        return httpx.get(f"{site.api}/health").is_success
    except httpx.TransportError:
        return False


def test_what_is_killed_soon_after_a_restart_of_the_server_goes_on(
    start, site: SiteHere, client, config, root, tmp_path: Path
):
    """The restarted server has forgotten the events for which it was waiting."""
    with staying(site):
        for second in ("worker", "process"):  # of the flow run
            flow_run = begun_rollout(start, config, root, second)
            kill(site, "server")
            process = flow_process(site)
            if second == "worker":
                kill(site, "worker")
            else:
                process.kill()
            (tmp_path / "slow-rollout").unlink()
            done = ended(site, client, flow_run, attempt=2)
            assert done.state.is_completed(), done.state
            assert not process.is_running()
            assert need(open_root(root), second, 1, Stage.ROLLOUT).attempt == 1


def test_a_flow_run_that_loses_its_lease_ends_as_cancelled_and_says_who_has_it(
    start, site: SiteHere, client, config, root, tmp_path: Path
):
    flow_run = begun_rollout(start, config, root, "d")
    process = flow_process(site)
    assert command("unlock", "d", "--force", f"--root={root}").code == 0
    (tmp_path / "slow-rollout").unlink()
    found = ended(site, client, flow_run)
    assert found.state.type is StateType.CANCELLED
    assert "it was ended by ratchet unlock" in found.state.message
    assert not process.is_running()
