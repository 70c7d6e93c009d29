"""A notification for each flow run of the site that ends red: the server calls a webhook."""

import contextlib
from typing import Any

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.types import SecretDict
from pydantic import SecretStr

from storage.errors import InputError
from tasks.config.credentials import has_credentials
from tasks.config.environment import resolve

OFF = "off"
"""In place of a URL: no notification any more."""
AUTOMATION = "ratchet: a flow run that failed notifies"

_BLOCK = "ratchet-notification"
_TYPE = "webhook"
_RED = {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}
_MESSAGE = '(flow_run.state.message or "no message")'
_TEXT = f'(flow_run.name ~ " of " ~ flow.name ~ " is " ~ flow_run.state.name ~ ": " ~ {_MESSAGE})'
_PAYLOAD = (
    f'{{"text": {{{{ {_TEXT} | tojson }}}}, "flow": {{{{ flow.name | tojson }}}}, '
    '"flow_run": {{ flow_run.name | tojson }}, "state": {{ flow_run.state.name | tojson }}, '
    '"url": {{ flow_run | ui_url | tojson }}}'
)
"""`text` is what Slack, Mattermost and others show."""


def webhook_url(given: str) -> str:
    """The URL that was given, or that of the variable in `env:NAME`; or OFF.

    Raises:
        InputError: it has a password in it, or is no URL.
    """
    if given == OFF:
        return OFF
    if has_credentials(given):
        raise InputError("--notify has a password in it: give it as env:NAME, and export NAME")
    url = resolve(given, "--notify")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InputError("--notify is no URL of a webhook: give https://..., env:NAME, or off")
    return url


def keep_notification(client: SyncPrefectClient, tag: str, url: str) -> None:
    """Notify `url` of each flow run with that tag that fails or crashes; with OFF, nobody.

    The server keeps the URL encrypted. An automation that exists stays as it is, changed or paused by a person.
    """
    there = client.read_automations_by_name(AUTOMATION)
    if url == OFF:
        for one in there:
            client.delete_automation(one.id)
        _forget_block(client)
        return
    block = Webhook(url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"}))
    identity = block.save(_BLOCK, overwrite=True)
    if not there:
        client.create_automation(_automation(tag, identity))


def _automation(tag: str, block: Any) -> AutomationCore:
    tagged = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}
    red = EventTrigger(
        match=ResourceSpecification(root={"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=ResourceSpecification(root=tagged),  # pyright: ignore[reportArgumentType]
        expect=_RED,
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
    )
    text = "A webhook is called with the flow run's name, its state and a link. `ratchet up --notify off` removes this."
    return AutomationCore(
        name=AUTOMATION, description=text, trigger=red, actions=[CallWebhook(block_document_id=block, payload=_PAYLOAD)]
    )


def _forget_block(client: SyncPrefectClient) -> None:
    with contextlib.suppress(ObjectNotFound):
        found = client.read_block_document_by_name(_BLOCK, _TYPE)
        client.delete_block_document(found.id)
