"""What the flow of every deployment does around its work: it says what it will do, and explains what stops it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Failed

from flows.deployments.explaining import LastLines, explained, show_failure
from storage.errors import InputError, RatchetError
from tasks.config.code_version import code_version
from tasks.config.credentials import has_credentials, shown_text
from tasks.config.environment import without_secrets


@dataclass(frozen=True)
class Asked:
    """What a flow run was asked for."""

    run: str
    """Id of the run, or what stands for several."""
    root: str
    """Storage root."""
    will: str
    """What the flow run will do, in one line, with which its log begins."""
    retry: str = "repeats only the stage that failed, from what it has stored, and goes on"
    """What Retry does once a stage has begun."""
    places: Mapping[str, str | None] = field(default_factory=dict)
    """Other paths and URLs that were given, by parameter."""


def attempt(asked: Asked, work: Callable[[], State[Any]]) -> State[Any]:
    """Do the work of a flow run. An error of ours ends it red, with what a person needs to know."""
    logger = get_run_logger()
    logger.info("%s", without_secrets(f"{asked.will}, in {asked.root}"))
    _warn_of_versions(logger)
    with LastLines() as lines:
        try:
            check_places({"root": asked.root, **asked.places})
            state = work()
        except (RatchetError, MemoryError) as error:
            return _failed(error, asked, lines)
    logger.info("%s", state.message)
    return state


def fix(**found: Any) -> None:
    """Replace parameters of this flow run for good, so that a Retry has the same."""
    given, identity = flow_run.get_parameters(), flow_run.get_id()
    kept = {**given, **found}
    if identity is not None and kept != given:
        with get_client(sync_client=True) as client:
            client.request("PATCH", "/flow_runs/{id}", path_params={"id": UUID(identity)}, json={"parameters": kept})


def check_places(places: Mapping[str, str | None]) -> None:
    """Refuse paths that mean something else elsewhere, and URLs with credentials in them.

    Raises:
        InputError: it says which.
    """
    for name, place in places.items():
        if place is None:
            continue
        if has_credentials(place):
            raise InputError(
                f"{name} {shown_text(place)} has credentials in its URL: remove them and set them where the AWS SDK "
                "looks for them (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)"
            )
        if not is_absolute(place):
            raise InputError(
                f"{name} is {place!r}: give an absolute path or a URL, because a Retry may start elsewhere"
            )


def is_absolute(place: str) -> bool:
    """Whether a path or URL means the same from every folder."""
    local = place.removeprefix("file://")
    return "://" in local or Path(local).is_absolute()


def _failed(error: BaseException, asked: Asked, lines: LastLines) -> State[Any]:
    why = explained(error, asked.run, asked.root, asked.retry)
    show_failure(asked.run, why, lines.kept)
    get_run_logger().error("%s", why.message, exc_info=None if isinstance(error, InputError) else error)
    return Failed(message=why.message)


def _warn_of_versions(logger: "logging.Logger | logging.LoggerAdapter[Any]") -> None:
    """Say so if the worker runs another version of Ratchet than the one that registered the deployment."""
    registered = deployment.version
    if registered and registered != code_version():
        logger.warning(
            "this worker runs Ratchet %s, the deployment was registered by %s: `ratchet up` registers it again",
            code_version(),
            registered,
        )
