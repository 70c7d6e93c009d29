"""What a server is told: the work pool, every deployment of a file, the automations. Repeating it changes nothing."""

import importlib
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.schedules import construct_schedule
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.server.history import TAG
from flows.site.automations import keep_automations
from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT, code_version

POOL = "ratchet"


class ScheduleEntry(BaseModel):
    """A schedule of a deployment. Which one it is says its slug; those made in the UI are left alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slug: str
    cron: str | None = None
    interval: float | None = None
    """Seconds."""
    timezone: str | None = None
    active: bool = True
    parameters: dict[str, Any] = Field(default_factory=dict)


class DeploymentEntry(BaseModel):
    """A deployment, as Prefect's own `prefect deploy` reads it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    entrypoint: str
    """module.function of a flow."""
    description: str | None = None
    tags: tuple[str, ...] = ()
    parameters: dict[str, Any] = Field(default_factory=dict)
    schedules: tuple[ScheduleEntry, ...] = ()
    work_pool: dict[str, Any] = Field(default_factory=dict)


Deployments = tuple[tuple[DeploymentEntry, Flow[..., Any]], ...]


class DeploymentsFile(BaseModel):
    """A file in the format of prefect.yaml, as far as it is used here."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    deployments: tuple[DeploymentEntry, ...]


def register(deployments: Deployments, at_once: int | None) -> tuple[str, ...]:
    """Register everything with the server that Prefect is connected to.

    Args:
        deployments: each with its flow.
        at_once: flow runs that may be executed at the same time; None keeps what the pool has, at first 1.

    Returns:
        The deployments, as flow/deployment.
    """
    with get_client(sync_client=True) as client:
        _keep_pool(client, at_once)
        names = tuple(_keep_deployment(client, entry, flow) for entry, flow in deployments)
        keep_automations(client, TAG)
    return names


def read_deployments(file: Path) -> Deployments:
    """The deployments of a file in the format of prefect.yaml, each with its flow.

    Raises:
        InputError: it cannot be read, or names a flow that does not exist.
    """
    try:
        document = DeploymentsFile.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise InputError(f"the deployments in {file} cannot be used: {error}") from None
    return tuple((entry, _flow(entry)) for entry in document.deployments)


def _flow(entry: DeploymentEntry) -> Flow[..., Any]:
    module, _, name = entry.entrypoint.rpartition(".")
    try:
        found = vars(importlib.import_module(module)).get(name)
    except (ImportError, ValueError) as error:
        raise InputError(f"deployment {entry.name}: {entry.entrypoint} cannot be imported: {error}") from None
    if not isinstance(found, Flow):
        raise InputError(f"deployment {entry.name}: {entry.entrypoint} is not a flow: give module.function")
    return found


def _keep_pool(client: SyncPrefectClient, at_once: int | None) -> None:
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=at_once or 1))
        return
    if at_once is not None:
        client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=at_once))


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
        schedule = construct_schedule(interval=entry.interval, cron=entry.cron, timezone=entry.timezone)
        if entry.slug in there:  # whether it is active was decided by a person since
            client.update_deployment_schedule(deployment, there[entry.slug].id, schedule=schedule)
        else:
            made = DeploymentScheduleCreate(
                schedule=schedule, active=entry.active, parameters=entry.parameters, slug=entry.slug
            )
            client.create_deployment_schedules(deployment, [made])
