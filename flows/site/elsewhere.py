"""`ratchet register`: the deployments of a file on a Prefect server that Ratchet does not run."""

from pathlib import Path

import httpx
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import get_current_settings
from pydantic import BaseModel, ConfigDict

from flows.site.entries import read_deployments
from flows.site.notification import webhook_url
from flows.site.registration import register
from storage.errors import InputError
from tasks.config.credentials import shown_text


class Registered(BaseModel):
    """What `ratchet register` has registered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    deployments: tuple[str, ...]
    """As flow/deployment."""


def register_elsewhere(deployments: Path, at_once: int | None, notify: str | None) -> tuple[str, ...]:
    """Register with the server of Prefect's own settings; arguments as those of `ratchet up`.

    Raises:
        InputError: there is no such server, it does not answer or refuses, or the deployments cannot be read.
    """
    found = read_deployments(deployments)
    webhook = None if notify is None else webhook_url(notify)
    api = get_current_settings().api.url
    if not api:
        raise InputError("PREFECT_API_URL is not set: set it to the API of your Prefect server, or use `ratchet up`")
    try:
        return register(found, at_once, webhook)
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        raise InputError(
            f"the Prefect server {shown_text(api)} does not answer or refuses ({error}): start it, or correct "
            "PREFECT_API_URL and PREFECT_API_AUTH_STRING"
        ) from None
