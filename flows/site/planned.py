"""What `ratchet doctor` says of ports and of what a server is told to do: deployments, schedules, the work pool."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    DeploymentFilterTags,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound

from flows.server.history import TAG
from flows.site.folder import RunningProcess
from flows.site.processes import find, taken
from flows.site.registration import POOL, queues_of
from tasks.config.code_version import code_version

PORT = 4200
"""Where `ratchet up` starts a server unless it is told otherwise."""
SETTLES = timedelta(minutes=5)
"""A schedule that is younger may have no flow run planned yet: the server plans about once a minute."""

_LOOPBACK = ("127.0.0.1", "::1")
_PAGE = 200


class Fact(NamedTuple):
    """What a check has found."""

    check: str
    level: Literal["ok", "warning", "error"]
    text: str


def free_port(port: int = PORT) -> Fact:
    """Whether `ratchet up` can have its port; for a machine without a site."""
    if (why := taken(port)) is not None:
        return Fact("ports", "warning", f"{port} {why}: `ratchet up --port` takes another one")
    return Fact("ports", "ok", f"{port} is free for `ratchet up`")


def listeners(processes: Sequence[RunningProcess]) -> Fact:
    """Whether the processes of a site and what they have started listen on this machine alone."""
    beyond: list[str] = []
    count = 0
    for one in filter(None, map(find, processes)):
        for process in (one, *one.children(recursive=True)):
            places = _listening(process)
            count += len(places)
            beyond += [f"process {process.pid} on {ip}:{port}" for ip, port in places if ip not in _LOOPBACK]
    if beyond:
        text = f"others can connect to {', '.join(beyond)}: unset what makes it listen there, or close it by a firewall"
        return Fact("ports", "error", text)
    return Fact("ports", "ok", f"{count} listen, on the loopback interface alone")


def _listening(process: psutil.Process) -> list[tuple[str, int]]:
    try:
        found = process.net_connections("inet")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN]


def told(client: SyncPrefectClient, now: datetime | None = None) -> Iterator[Fact]:
    """What is wrong with work pool, deployments and schedules of the server, or that nothing is."""
    yield _pool(client)
    deployments = client.read_deployments(
        deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG])), limit=_PAGE
    )
    yield _versions(deployments)
    yield _planned(client, deployments, now or datetime.now(UTC))


def _pool(client: SyncPrefectClient) -> Fact:
    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        return Fact("work pool", "error", f"there is no work pool {POOL!r}: `ratchet up` makes it")
    if pool.is_paused:
        text = f"work pool {POOL!r} is paused, so no flow run starts: resume it in the UI under Work Pools"
        return Fact("work pool", "warning", text)
    if pool.concurrency_limit is not None:
        text = f"work pool {POOL!r} has one limit of {pool.concurrency_limit}, so upkeep waits for training"
        return Fact("work pool", "warning", f"{text}: remove it in the UI under Work Pools; its queues have limits")
    limits = [f"{name} {one.concurrency_limit or 'any number'}" for name, one in queues_of(client).items()]
    return Fact("work pool", "ok", f"{POOL}, flow runs at once by queue: {', '.join(limits)}")


def _versions(deployments: Sequence[DeploymentResponse]) -> Fact:
    if not deployments:
        return Fact("deployments", "error", "none is registered: `ratchet up` does that")
    old = [one.name for one in deployments if one.version != code_version()]
    if old:
        text = f"{', '.join(old)} were registered by another version of Ratchet: `ratchet up` registers them again"
        return Fact("deployments", "warning", text)
    return Fact("deployments", "ok", ", ".join(sorted(one.name for one in deployments)))


def _planned(client: SyncPrefectClient, deployments: Sequence[DeploymentResponse], now: datetime) -> Fact:
    scheduled = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])))
    idle, active = [], 0
    for one in deployments:
        due = [schedule for schedule in one.schedules if schedule.active and not one.paused]
        active += len(due)
        if not any(schedule.created and schedule.created < now - SETTLES for schedule in due):
            continue
        chosen = DeploymentFilter(id=DeploymentFilterId(any_=[one.id]))
        if not client.read_flow_runs(flow_run_filter=scheduled, deployment_filter=chosen, limit=1):
            idle.append(one.name)
    if idle:
        text = (
            f"deployments {', '.join(idle)} have a schedule, but no flow run is planned: the server's scheduler does "
            "not work (its log says why), or the schedule has no further time. `ratchet down`, then `ratchet up`"
        )
        return Fact("planned", "error", text)
    return Fact("planned", "ok", f"{active or 'no'} active schedules")
