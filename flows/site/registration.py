"""What a server is told: the work pool, every deployment of a file, the automations. Repeating it changes nothing."""

import shlex
import sys
from collections.abc import Iterable
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentScheduleUpdate,
    DeploymentUpdate,
    WorkPoolCreate,
)
from prefect.client.schemas.objects import DeploymentSchedule, WorkQueue
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema

from flows.server.history import TAG
from flows.site.automations import keep_automations
from flows.site.entries import DeploymentEntry, Deployments, ScheduleEntry
from flows.site.notification import keep_notification
from tasks.config.code_version import PROJECT_ROOT, code_version

POOL = "ratchet"
TRAINING, UPKEEP = "default", "upkeep"
"""Queues of the pool: what trains, and what does not wait for it, such as maintenance and evaluations."""

_UPKEEP_AT_ONCE = 2


def register(deployments: Deployments, at_once: int | None, webhook: str | None = None) -> tuple[str, ...]:
    """Register everything with the server that Prefect is connected to.

    Args:
        deployments: each with its flow.
        at_once: flow runs that may train at the same time; None keeps what the queue has, at first 1.
        webhook: what is told of flow runs that end red, as `keep_notification` takes it; None changes nothing.

    Returns:
        The deployments, as flow/deployment.
    """
    with get_client(sync_client=True) as client:
        _keep_pool(client, at_once)
        names = tuple(_keep_deployment(client, entry, flow) for entry, flow in deployments)
        keep_automations(client, TAG)
        if webhook is not None:
            keep_notification(client, TAG, webhook)
    return names


def _keep_pool(client: SyncPrefectClient, at_once: int | None) -> None:
    """Each queue has its limit, and the pool has none: that would be one for all queues."""
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        at_once = at_once or 1
    queues = queues_of(client)
    if at_once is not None:
        client.update_work_queue(queues[TRAINING].id, concurrency_limit=at_once)
    if UPKEEP not in queues:
        client.create_work_queue(UPKEEP, concurrency_limit=_UPKEEP_AT_ONCE, work_pool_name=POOL)


def queues_of(client: SyncPrefectClient) -> dict[str, WorkQueue]:
    """The queues of the pool by name."""
    return {one.name: one for one in client.read_work_queues(work_pool_name=POOL)}


def _keep_deployment(client: SyncPrefectClient, entry: DeploymentEntry, flow: Flow[..., Any]) -> str:
    settings = {
        "version": code_version(),
        "description": entry.description or flow.description,
        "tags": [TAG, *entry.tags],
        "parameters": entry.parameters,
        "parameter_openapi_schema": parameter_schema(flow).model_dump_for_openapi(),
        "enforce_parameter_schema": True,
        "entrypoint": entry.entrypoint,
        "work_pool_name": entry.work_pool.get("name", POOL),
        "work_queue_name": entry.work_pool.get("work_queue_name", TRAINING),
        "job_variables": {
            "command": f"{shlex.quote(sys.executable)} -m flows.deployments.process",
            "working_dir": str(PROJECT_ROOT),  # else a temporary folder, gone when two attempts overlap
            **entry.work_pool.get("job_variables", {}),
        },
    }
    name = f"{flow.name}/{entry.name}"
    try:
        identity = client.read_deployment_by_name(name).id
        client.update_deployment(identity, DeploymentUpdate(**settings))
    except ObjectNotFound:
        identity = client.create_deployment(client.create_flow(flow), entry.name, **settings)
    _keep_schedules(client, identity, entry.schedules)
    return name


def _keep_schedules(client: SyncPrefectClient, deployment: Any, entries: Iterable[ScheduleEntry]) -> None:
    there = {one.slug: one for one in client.read_deployment_schedules(deployment)}
    for entry in entries:
        if entry.slug in there:  # whether it is active was decided by a person since
            _change_schedule(client, deployment, there[entry.slug], entry)
        else:
            made = DeploymentScheduleCreate(
                schedule=entry.schedule(), active=entry.active, parameters=entry.parameters, slug=entry.slug
            )
            client.create_deployment_schedules(deployment, [made])


def _change_schedule(
    client: SyncPrefectClient, deployment: Any, there: DeploymentSchedule, entry: ScheduleEntry
) -> None:
    # an interval counts from its first registration; the client itself has no way to change parameters
    schedule, before = entry.schedule(), there.schedule
    if isinstance(schedule, IntervalSchedule) and isinstance(before, IntervalSchedule):
        schedule = schedule.model_copy(update={"anchor_date": before.anchor_date})
    changed = DeploymentScheduleUpdate(schedule=schedule, parameters=entry.parameters)
    client.request(
        "PATCH",
        "/deployments/{id}/schedules/{schedule_id}",
        path_params={"id": deployment, "schedule_id": there.id},
        json=changed.model_dump(mode="json", exclude_unset=True),
    )
