"""Findings of the doctor on ports, and on the registration of a real server."""

import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
from prefect.states import Scheduled

from flows.site.doctor import SETTLES, free_port, is_loopback, listeners, told
from flows.site.processes import RunningProcess
from flows.site.registration import POOL, TRAINING, UPKEEP, queues_of, register_elsewhere
from storage.ownership.process import born
from tasks.config.code_version import PROJECT_ROOT

RUN = {"run": "a", "root": "/data/runs", "more": 1}
NIGHTLY = {"slug": "nightly", "cron": "0 2 * * *", "parameters": RUN}


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        _forget(client)  # other tests use this server too
        yield client
        _forget(client)


def _forget(client: SyncPrefectClient) -> None:
    for one in client.read_deployments():
        client.delete_deployment(one.id)
    if any(pool.name == POOL for pool in client.read_work_pools()):
        client.delete_work_pool(POOL)


def levels(client: SyncPrefectClient, **more) -> dict[str, str]:
    return {one.check: one.level for one in told(client, **more)}


def test_a_server_that_was_told_nothing(client: SyncPrefectClient):
    assert levels(client) == {"work pool": "error", "deployments": "error", "planned": "ok"}


@pytest.mark.slow
def test_a_pool_that_is_paused_and_a_deployment_of_another_version_are_warnings(client: SyncPrefectClient):
    register_elsewhere(PROJECT_ROOT / "infra" / "prefect.yaml", None, None)
    assert set(levels(client).values()) == {"ok"}
    made = client.read_deployment_by_name("maintain/maintain")
    assert (made.work_queue_name, {name: one.concurrency_limit for name, one in queues_of(client).items()}) == (
        UPKEEP,
        {TRAINING: 1, UPKEEP: 2},
    )
    register_elsewhere(PROJECT_ROOT / "infra" / "prefect.yaml", 3, None)
    register_elsewhere(PROJECT_ROOT / "infra" / "prefect.yaml", None, None)
    assert [queues_of(client)[name].concurrency_limit for name in (TRAINING, UPKEEP)] == [3, 2]
    client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=1))
    assert levels(client)["work pool"] == "warning"  # one limit for both queues
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
    deployment = client.read_deployment_by_name("maintain/maintain")
    client.update_deployment(deployment.id, DeploymentUpdate(version="0.0.1"))
    facts = {one.check: one for one in told(client)}
    assert (facts["work pool"].level, facts["deployments"].level) == ("warning", "warning")
    assert "resume it in the UI" in facts["work pool"].text
    assert facts["deployments"].text.startswith("maintain were registered by another version")


def test_a_schedule_for_which_nothing_is_planned_is_an_error(client: SyncPrefectClient, tmp_path: Path):
    entry = {"name": "nightly", "entrypoint": "flows.deployments.runs.train", "schedules": [NIGHTLY]}
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump({"deployments": [entry]}))
    register_elsewhere(tmp_path / "prefect.yaml", None, None)
    deployment = client.read_deployment_by_name("train/nightly")
    for planned in client.read_flow_runs():  # this server may plan or not
        client.delete_flow_run(planned.id)
    later = datetime.now(UTC) + 2 * SETTLES
    assert levels(client)["planned"] == "ok"  # it is too young
    (found,) = [one for one in told(client, now=later) if one.check == "planned"]
    assert found.level == "error"
    assert "deployments nightly have a schedule, but no flow run is planned" in found.text
    client.create_flow_run_from_deployment(deployment.id, parameters=RUN, state=Scheduled(scheduled_time=later))
    assert levels(client, now=later)["planned"] == "ok"


@pytest.mark.parametrize(("host", "level"), [("127.0.0.1", "ok"), ("0.0.0.0", "error")])
def test_what_listens_beyond_this_machine_is_an_error(host: str, level: str):
    here = psutil.Process()
    one = RunningProcess(role="server", process=here.pid, started=born(here.pid), version="x")
    before = listeners([one]).level
    with socket.create_server((host, 0)) as server:
        found = listeners([one])
        assert found.level == (level if before == "ok" else before)
        assert level == "ok" or f"0.0.0.0:{server.getsockname()[1]}" in found.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "::ffff:127.0.0.1"])
def test_a_loopback_address_is_one_in_any_form(host: str):
    """Ray's agents listen on sockets of IPv6 for addresses of IPv4."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:10.0.0.1", "fe80::1%eth0", "10.0.0.1"])
def test_other_addresses_are_none(host: str):
    assert not is_loopback(host)


def test_a_port_that_is_taken_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = free_port(port)
    assert (taken.level, f"{port} is taken by process" in taken.text) == ("warning", True)
    assert free_port(port).level == "ok"


def test_a_port_that_a_connection_was_given_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        port = connection.getsockname()[1]
        taken = free_port(port)
    assert (taken.level, f"{port} is taken by a connection" in taken.text) == ("warning", True)
