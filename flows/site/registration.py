"""Registration with a Prefect server: work pool, deployments, automations, a webhook. Repeating it changes nothing.

The automation `silence` declares a flow run Crashed that has been silent for long, wherever its process was. A worker
then tries it again (`flows.site.reconciling`). Two processes never drive one run, whatever the server believes: a flow
run that is declared dead while it lives still holds its run's lease, and its successor waits for it."""

import contextlib
import shlex
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
from prefect import Flow
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import actions
from prefect.client.schemas.objects import DeploymentSchedule, StateType, WorkQueue
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events.actions import CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import get_current_settings
from prefect.types import SecretDict
from prefect.utilities.callables import parameter_schema
from pydantic import SecretStr

from flows.server.history import TAG
from flows.site.entries import DeploymentEntry, Deployments, ScheduleEntry, read_deployments
from flows.site.reconciling import AGAIN
from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT, code_version
from tasks.config.credentials import has_credentials, shown_text
from tasks.config.environment import HEARTBEAT_S, resolve

POOL = "ratchet"
TRAINING, UPKEEP = "default", "upkeep"
"""Queues of the pool: for training, and for work that does not wait for it, such as maintenance and evaluations."""
SILENCE_S = 3 * HEARTBEAT_S  # a flow run is declared dead after this long without a heartbeat
OFF = "off"  # in place of a URL: no notification any more
AUTOMATION = "ratchet: a flow run that failed notifies"

_UPKEEP_AT_ONCE = 2
_EVENT = "prefect.flow-run."
_BEAT = f"{_EVENT}heartbeat"
_ENDS = {f"{_EVENT}{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Paused")}
_AGAIN = {f"{_EVENT}{name}" for name in ("AwaitingRetry", "Scheduled", AGAIN)}
_BLOCK, _BLOCK_TYPE = "ratchet-notification", "webhook"
_MESSAGE = '(flow_run.state.message or "no message")'
_TEXT = f'(flow_run.name ~ " of " ~ flow.name ~ " is " ~ flow_run.state.name ~ ": " ~ {_MESSAGE})'
_PAYLOAD = (
    f'{{"text": {{{{ {_TEXT} | tojson }}}}, "flow": {{{{ flow.name | tojson }}}}, '
    '"flow_run": {{ flow_run.name | tojson }}, "state": {{ flow_run.state.name | tojson }}, '
    '"url": {{ flow_run | ui_url | tojson }}}'
)  # `text` is what Slack, Mattermost and others show


def register(deployments: Deployments, at_once: int | None, webhook: str | None = None) -> tuple[str, ...]:
    """Register everything with the server that Prefect is connected to, and return the deployments, as flow/deployment.

    At most `at_once` flow runs train at the same time; None keeps the queue's limit, at first 1. `webhook` is a URL for
    `keep_notification`; None changes nothing."""
    with get_client(sync_client=True) as client:
        _keep_pool(client, at_once)
        names = tuple(_keep_deployment(client, entry, flow) for entry, flow in deployments)
        _keep_automation(client, silence(TAG))
        if webhook is not None:
            keep_notification(client, TAG, webhook)
    return names


def register_elsewhere(file: Path, at_once: int | None, notify: str | None) -> tuple[str, ...]:
    """Register the deployments of a file with the server of Prefect's own settings, as `ratchet up` does with its own.
    Raises InputError if there is no such server, it does not answer or refuses, or the deployments cannot be read."""
    found = read_deployments(file)
    webhook = None if notify is None else webhook_url(notify)
    api = get_current_settings().api.url
    if not api:
        raise InputError("PREFECT_API_URL is not set: set it to the API of your Prefect server, or use `ratchet up`")
    try:
        return register(found, at_once, webhook)
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        fact = f"the Prefect server {shown_text(api)} does not answer or refuses ({error})"
        raise InputError(f"{fact}: start it, or correct PREFECT_API_URL and PREFECT_API_AUTH_STRING") from None


def queues_of(client: SyncPrefectClient) -> dict[str, WorkQueue]:
    return {one.name: one for one in client.read_work_queues(work_pool_name=POOL)}


def silence(tag: str) -> AutomationCore:
    """The automation for flow runs with that tag whose process is gone."""
    text = f"its process has been silent for {SILENCE_S} s"
    crashed = ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=text, force=False)
    # what continues is watched again from its first heartbeat
    silent = {"after": {_BEAT}, "expect": {_BEAT, *_ENDS, *_AGAIN}, "within": timedelta(seconds=SILENCE_S)}
    return AutomationCore(
        name="ratchet: a flow run whose process is gone is crashed",
        description=f"No heartbeat for {SILENCE_S} s; the process sends one every {HEARTBEAT_S} s.",
        trigger=_trigger(tag, posture=Posture.Proactive, **silent),
        actions=[crashed],
    )


def webhook_url(given: str) -> str:
    """The URL that was given, or that in `env:NAME`; or OFF. Raises InputError for a password, or no URL."""
    if given == OFF:
        return OFF
    if has_credentials(given):
        raise InputError("--notify has a password in it: give it as env:NAME, and export NAME")
    url = resolve(given, "--notify")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InputError("--notify is not a URL of a webhook: give https://..., env:NAME, or off")
    return url


def keep_notification(client: SyncPrefectClient, tag: str, url: str) -> None:
    """Notify `url` of each flow run with that tag that fails or crashes; with OFF, nobody.

    The server keeps the URL encrypted. An automation that exists stays as it is, changed or paused by a person."""
    if url == OFF:
        for one in client.read_automations_by_name(AUTOMATION):
            client.delete_automation(one.id)
        with contextlib.suppress(ObjectNotFound):
            client.delete_block_document(client.read_block_document_by_name(_BLOCK, _BLOCK_TYPE).id)
        return
    block = Webhook(url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"}))
    identity: Any = block.save(_BLOCK, overwrite=True)
    call = CallWebhook(block_document_id=identity, payload=_PAYLOAD)
    red = _trigger(tag, expect={f"{_EVENT}Failed", f"{_EVENT}Crashed"}, posture=Posture.Reactive)
    text = "A webhook is called with the flow run's name, its state and a link. `ratchet up --notify off` removes this."
    _keep_automation(client, AutomationCore(name=AUTOMATION, description=text, trigger=red, actions=[call]))


def _trigger(tag: str, **more: Any) -> EventTrigger:
    every: Any = {"prefect.resource.id": f"{_EVENT}*"}
    tagged: Any = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}
    return EventTrigger(match=every, match_related=tagged, for_each={"prefect.resource.id"}, threshold=1, **more)


def _keep_automation(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    """Create an automation if it is missing; one that exists is left as it is, changed or paused by a person."""
    if not client.read_automations_by_name(wanted.name):
        client.create_automation(wanted)


def _keep_pool(client: SyncPrefectClient, at_once: int | None) -> None:
    """Each queue has its limit, and the pool has none: that would be one for all queues."""
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(actions.WorkPoolCreate(name=POOL, type="process"))
        at_once = at_once or 1
    queues = queues_of(client)
    if at_once is not None:
        client.update_work_queue(queues[TRAINING].id, concurrency_limit=at_once)
    if UPKEEP not in queues:
        client.create_work_queue(UPKEEP, concurrency_limit=_UPKEEP_AT_ONCE, work_pool_name=POOL)


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
        client.update_deployment(identity, actions.DeploymentUpdate(**settings))
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
            given = entry.model_dump(include={"active", "parameters", "slug"})
            made = actions.DeploymentScheduleCreate(schedule=entry.schedule(), **given)
            client.create_deployment_schedules(deployment, [made])


def _change_schedule(
    client: SyncPrefectClient, deployment: Any, there: DeploymentSchedule, entry: ScheduleEntry
) -> None:
    # an interval counts from its first registration; the client itself has no way to change parameters
    schedule, before = entry.schedule(), there.schedule
    if isinstance(schedule, IntervalSchedule) and isinstance(before, IntervalSchedule):
        schedule = schedule.model_copy(update={"anchor_date": before.anchor_date})
    changed = actions.DeploymentScheduleUpdate(schedule=schedule, parameters=entry.parameters)
    place = {"id": deployment, "schedule_id": there.id}
    body = changed.model_dump(mode="json", exclude_unset=True)
    client.request("PATCH", "/deployments/{id}/schedules/{schedule_id}", path_params=place, json=body)
