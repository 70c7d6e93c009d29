"""The frame around the work of every deployment: its form, its first log line, its wait for the run, its failure."""

import inspect
import io
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Annotated, Any
from uuid import UUID

from prefect import Flow, flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Failed
from pydantic import Field
from rich.console import Console

from flows.deployments.explaining import LastLines, explained, show_failure
from storage.errors import InputError, LeaseHeld, LeaseLost, RatchetError
from storage.ownership.stopping import ASKED_FOR, STOP_SIGNAL
from tasks.config.code_version import code_version
from tasks.config.credentials import ELSEWHERE, has_credentials, shown_text
from tasks.config.environment import without_secrets

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Minutes = Annotated[float, Field(ge=0)]

_FIELDS = {
    "run": "Id of the run.",
    "root": "Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.",
    "settings": "Settings that replace those of the configuration, each as section.key=value.",
    "patience_minutes": "How long to wait for another process that drives this run. After that the flow run ends as "
    "Cancelled and names that process.",
}
_LOOK_S = 5.0
_WIDTH = 400  # of a line of progress


def form[**P, R](
    name: str, title: str | Callable[[], str], fields: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """A flow whose form describes each field: by the docstring of the function, or as `_FIELDS` does. `title` names a
    flow run in the UI; a text may name parameters in braces."""

    def made(work: Callable[P, R]) -> Flow[P, R]:
        text = inspect.getdoc(work) or ""
        known = {**_FIELDS, **fields}
        own = [one for one in inspect.signature(work).parameters if one in known and f"\n    {one}: " not in text]
        head = text if "\nArgs:\n" in text else f"{text}\n\nArgs:"
        work.__doc__ = "\n".join([head, *(f"    {one}: {known[one]}" for one in own)])
        return flow(name=name, flow_run_name=title, persist_result=False, validate_parameters=True)(work)

    return made


@dataclass(frozen=True)
class Asked:
    """The request of a flow run."""

    run: str
    """Id of the run, or a text for several."""
    root: str
    will: str
    """Description of the work, in one line: the first line of the log."""
    retry: str = "repeats only the stage that failed, from what it has stored, and goes on"
    """Effect of Retry once a stage has begun."""
    places: Mapping[str, str | None] = field(default_factory=dict)
    """Other paths and URLs that were given, by parameter."""
    patience_minutes: float | None = None
    """Longest wait for another process that drives the run; None if the work does not need its lease."""


def attempt(asked: Asked, work: Callable[[], State[Any]]) -> State[Any]:
    """Do the work of a flow run. A RatchetError fails it, with an explanation for the person who reads its page."""
    logger, begun = get_run_logger(), time.monotonic()
    logger.info("%s", without_secrets(f"{asked.will}, in {asked.root}"))
    _warn_of_versions(logger)
    with LastLines() as lines:
        try:
            check_places({"root": asked.root, **asked.places})
            if asked.patience_minutes is None:
                state = work()
            else:
                state = waiting(asked.run, work, begun + 60 * asked.patience_minutes, logger.info)
        except (RatchetError, MemoryError) as error:
            return _failed(error, asked, lines)
    logger.info("%s", state.message)
    return state


def _failed(error: BaseException, asked: Asked, lines: LastLines) -> State[Any]:
    why = explained(error, asked.run, asked.root, asked.retry)
    page = show_failure(asked.run, why, lines.kept)
    message = why.message if page is None else f"{why.message}\n\nThe same with the last lines of the log: {page}"
    get_run_logger().error("%s", message, exc_info=None if isinstance(error, InputError) else error)
    return Failed(message=message)


def waiting(run: str, work: Callable[[], State[Any]], deadline: float, say: Callable[[str], object]) -> State[Any]:
    """Do `work` as soon as no other process drives the run; Cancelled if that takes until `deadline`, or is stopped.

    A run that another process takes over during the work is not taken back.
    """
    told = False
    try:
        with stoppable():
            while True:
                try:
                    return work()
                except LeaseHeld as fact:
                    if time.monotonic() >= deadline:
                        return Cancelled(message=without_secrets(str(fact)))
                    if not told:
                        say(f"{without_secrets(str(fact))}. Waiting for it")
                        told = True
                    time.sleep(_LOOK_S)
    except LeaseLost as fact:
        return Cancelled(message=without_secrets(str(fact)))
    except Stopped:
        return Cancelled(message=f"`ratchet stop {run}` ended it. What was committed is kept: press Retry to continue")


class Stopped(KeyboardInterrupt):
    """`ratchet stop` ends the block: code that lets Ctrl-C through and cleans up after it treats this alike."""


@contextmanager
def stoppable() -> Iterator[None]:
    """A block of the main thread that ends with `Stopped` when `ratchet stop` asks for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(STOP_SIGNAL, _stop)
    try:
        yield
    finally:
        signal.signal(STOP_SIGNAL, before or signal.SIG_DFL)


def _stop(_number: int, _frame: FrameType | None) -> None:
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # a second one does not disturb the cleaning up
    raise Stopped("`ratchet stop`")


def fix(**found: Any) -> None:
    """Replace parameters of this flow run for good, so that a Retry has the same."""
    given, identity = flow_run.get_parameters(), flow_run.get_id()
    kept = {**given, **found}
    if identity is not None and kept != given:
        with get_client(sync_client=True) as client:
            client.request("PATCH", "/flow_runs/{id}", path_params={"id": UUID(identity)}, json={"parameters": kept})


def check_places(places: Mapping[str, str | None]) -> None:
    """Refuse relative paths and URLs with credentials in them. Raises InputError, which names the parameter."""
    for name, place in places.items():
        if place is None:
            continue
        if has_credentials(place):
            raise InputError(f"{name} {shown_text(place)} has credentials in its URL: {ELSEWHERE}")
        if not is_absolute(place):
            fact = f"{name} is {place!r}"
            raise InputError(f"{fact}: give an absolute path or a URL, because a Retry may start elsewhere")


def is_absolute(place: str) -> bool:
    """True for a path or URL that means the same from every folder."""
    local = place.removeprefix("file://")
    return "://" in local or Path(local).is_absolute()


def owner() -> str:
    """Name of this flow run in the lease of the run that it drives."""
    return f"{ASKED_FOR}{flow_run.get_name()}"


class _LogLines(io.TextIOBase):
    """A text stream whose lines go to the log of the current flow run."""

    def __init__(self) -> None:
        self._logger, self._begun = get_run_logger(), ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self._logger.info("%s", line)
        return len(text)


def log_console() -> Console:
    """A console that writes to the flow run's log and draws nothing live."""
    return Console(file=_LogLines(), force_terminal=False, color_system=None, width=_WIDTH)  # pyright: ignore[reportArgumentType]


def _warn_of_versions(logger: "logging.Logger | logging.LoggerAdapter[Any]") -> None:
    """Say so if the worker runs another version of Ratchet than the one that registered the deployment."""
    here, registered = code_version(), deployment.version
    if registered and registered != here:
        text = "this worker runs Ratchet %s, the deployment was registered by %s: `ratchet up` registers it again"
        logger.warning(text, here, registered)
