"""A real site, started and ended by the command line, whose worker runs the deployment over small workers."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

PROJECT = Path(__file__).resolve().parents[3]
SMALL = Path(__file__).with_name("small.yaml")
DEADLINE_S = 240


@dataclass(frozen=True)
class SiteHere:
    folder: Path
    port: int
    api: str

    @property
    def secret(self) -> str:
        return (self.folder / "secret").read_text().strip()

    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "site.json").read_text())

    def process(self, role: str) -> int:
        return next(one["process"] for one in self.record()["processes"] if one["role"] == role)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.run(
        [sys.executable, "-m", "flows", *words, "--json"],
        cwd=PROJECT, env={**environment, "PREFECT_WORKER_QUERY_SECONDS": "1"},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


def up(folder: Path, port: int, *more: str) -> dict[str, Any]:
    done = command("up", f"--folder={folder}", f"--port={port}", f"--deployments={SMALL}", *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteHere]:
    folder, port = tmp_path_factory.mktemp("site") / "site", free_port()
    try:
        yield SiteHere(folder, port, up(folder, port)["api"])
    finally:
        ended = command("down", f"--folder={folder}")
        assert ended.returncode == 0, ended.stderr


@contextmanager
def connected_to(site: SiteHere) -> Iterator[SyncPrefectClient]:
    settings = {PREFECT_API_URL: site.api, PREFECT_API_AUTH_STRING: site.secret}
    with temporary_settings(settings), get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="module")
def client(site: SiteHere) -> Iterator[SyncPrefectClient]:
    with connected_to(site) as client:
        yield client


@pytest.fixture
def start(client: SyncPrefectClient) -> Callable[..., FlowRun]:
    """Ask for a flow run of the deployment, as a person with the form does."""
    deployment = client.read_deployment_by_name("train/train")

    def start(**parameters: Any) -> FlowRun:
        return client.create_flow_run_from_deployment(deployment.id, parameters=parameters)

    return start


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_until_idle(site: SiteHere) -> None:
    """Until the process of the last flow run is gone: no person presses Retry within that second."""
    wait_for(lambda: not psutil.Process(site.process("worker")).children())


def ended(site: SiteHere, client: SyncPrefectClient, flow_run: FlowRun, attempt: int = 1) -> FlowRun:
    """The flow run once that attempt has ended."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = client.read_flow_run(flow_run.id)
        if found.state is not None and found.state.is_final() and found.run_count >= attempt:
            wait_until_idle(site)
            return found
        assert time.monotonic() < deadline, found.state
        time.sleep(0.2)


def fired(client: SyncPrefectClient, parameters: dict[str, Any]) -> FlowRun:
    """The first flow run that a schedule has started; the schedule ends with it."""
    deployment = client.read_deployment_by_name("train/train")
    schedule = IntervalSchedule(interval=timedelta(seconds=20), anchor_date=datetime.now(UTC))
    made = DeploymentScheduleCreate(schedule=schedule, active=True, parameters=parameters)
    (created,) = client.create_deployment_schedules(deployment.id, [made])
    while True:
        found = client.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])))
        begun = [run for run in found if run.auto_scheduled and run.start_time is not None]
        if begun:
            client.delete_deployment_schedule(deployment.id, created.id)
            return begun[0]
        time.sleep(0.5)
