"""The frame around the work of every deployment: its form, its first log line, its wait for the run, its failure."""

import inspect
import io
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self
from uuid import UUID

import httpx
from prefect import Flow, flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, PrefectException
from prefect.runtime import deployment, flow_run
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Failed
from pydantic import BaseModel, Field
from rich.console import Console

from flows.views.artifacts import artifact_key
from storage import errors
from storage.errors import InputError, LeaseHeld, LeaseLost, RatchetError
from storage.ownership.lease import ASKED_FOR, STOP_SIGNAL
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

logger = logging.getLogger(__name__)
_LINES = 20
_LONGEST = 500
_LOGGER = "prefect.flow_runs"
_MEMORY = (
    "A rank or an engine needs more memory than there is: lower train.micro_batch_size or train.micro_batch_tokens, or "
    "engine.gpu_memory_utilization and engine.max_num_seqs; none of them changes what the run means. Do it in the "
    "file that the flow run was given and press Retry, or start another flow run with `settings`."
)
_CORRECT = "Retry alone cannot help: correct the cause, then start again or press Retry."
_DAMAGED = "What is stored is damaged: `ratchet verify` names it. Retry does not repair it."
_REFUSES = "The store refuses: correct permission, space or address first, then press Retry."
_LOST = (
    "A process was lost more often than Ratchet replaces it by itself: press Retry to try again. If it is always the "
    "same stage, look for its cause first: memory of the card or of the host, the process's own log."
)
_NUMERICS = "The numbers are not finite, and a Retry would repeat them: change the learning rate, precision or data."
_DIFFERS = "The engine does not hold what was trained: raise the limits in [sync] only if you know why."
_NOTES: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str, bool], ...] = (
    (errors.StorageUnavailable, _REFUSES, False),
    (errors.InputError, _CORRECT, False),
    (errors.StorageInterrupted, "The store did not answer for a long time: press Retry once it does.", True),
    ((errors.OutOfMemory, MemoryError), _MEMORY, False),
    (errors.WorkerLost, _LOST, True),
    (errors.NumericsError, _NUMERICS, False),
    (errors.SyncMismatch, _DIFFERS, True),
    (errors.StageFailed, "Correct the cause, then press Retry.", False),
    ((errors.DigestMismatch, errors.PartMissing), _DAMAGED, False),
    (errors.SchemaMismatch, "Continue the run with the version of Ratchet that made it.", False),
)  # by type of error: the first step, and whether Retry may help without it


def form[**P, R](
    name: str, title: str | Callable[[], str], settings: type[BaseModel] | None = None
) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """A flow whose form describes each field: by the docstring of the function, that of the `settings` which it
    gives, or as `_FIELDS` does. `title` names a flow run in the UI; a text may name parameters in braces."""
    fields = {} if settings is None else {name: str(one.description) for name, one in settings.model_fields.items()}

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
    run: str  # id of the run, or a text for several
    root: str
    will: str  # description of the work, in one line: the first line of the log
    retry: str = "repeats only the stage that failed, from what it has stored, and goes on"
    """Effect of Retry once a stage has begun."""
    places: Mapping[str, str | None] = field(default_factory=dict)  # other paths and URLs that were given, by parameter
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
        except Pause:
            logger.info(
                "suspended: what was committed is kept, and Resume continues. After the time that was given with "
                "Suspend the server makes this flow run Failed; then Retry continues"
            )
            raise
        except (RatchetError, MemoryError) as error:
            return _failed(error, asked, lines)
    logger.info("%s", state.message)
    return state


def _failed(error: BaseException, asked: Asked, lines: "LastLines") -> State[Any]:
    why = explained(error, asked.run, asked.root, asked.retry)
    page = show_failure(asked.run, why, lines.kept)
    message = why.message if page is None else f"{why.message}\n\nThe same with the last lines of the log: {page}"
    get_run_logger().error("%s", message, exc_info=None if isinstance(error, InputError) else error)
    return Failed(message=message)


def waiting(run: str, work: Callable[[], State[Any]], deadline: float, say: Callable[[str], object]) -> State[Any]:
    """Do `work` as soon as no other process drives the run; Cancelled if that takes until `deadline`, or is stopped.

    A run that another process takes over during the work is not taken back."""
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
    def __init__(self) -> None:
        self._logger, self._begun = get_run_logger(), ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self._logger.info("%s", line)
        return len(text)


def log_console() -> Console:
    return Console(file=_LogLines(), force_terminal=False, color_system=None, width=_WIDTH)  # pyright: ignore[reportArgumentType]


def _warn_of_versions(logger: "logging.Logger | logging.LoggerAdapter[Any]") -> None:
    """Say so if the worker runs another version of Ratchet than the one that registered the deployment."""
    here, registered = code_version(), deployment.version
    if registered and registered != here:
        text = "this worker runs Ratchet %s, the deployment was registered by %s: `ratchet up` registers it again"
        logger.warning(text, here, registered)


@dataclass(frozen=True)
class Explained:
    stage: str | None  # stage under way; None if no stage was begun
    cause: str
    kept: str  # stored results, and the effect of Retry
    first: str

    @property
    def message(self) -> str:
        """Message of the flow run's state: the cause first, since the page shows the beginning."""
        place = "" if self.stage is None or self.stage in self.cause else f"During {self.stage}: "
        return "\n\n".join([f"{place}{self.cause}", self.first, self.kept])


def explained(error: BaseException, run: str, root: str, retry: str) -> Explained:
    """Explain a failure by the type of its error; `retry` is the effect of Retry once a stage has begun."""
    ours = isinstance(error, errors.RatchetError)
    cause, stage = (errors.told(error), error.during) if ours else (f"{type(error).__name__}: {error}", None)
    first, helps = next(((text, helps) for kind, text, helps in _NOTES if isinstance(error, kind)), (None, True))
    place = f"{shown_text(root)}/{run}"
    if stage is None and isinstance(error, errors.InputError):
        kept = f"No stage was begun, and nothing in {place} has changed."
    else:
        then = "Retry" if helps else "once that is done, Retry"
        kept = f"Everything that was committed is kept in {place}; {then} {retry}."
    return Explained(stage, without_secrets(cause), kept, first or "Press Retry to continue.")


class LastLines(logging.Handler):
    """Keeps the last lines of the flow run's log in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: deque[str] = deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger(_LOGGER).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(_LOGGER).removeHandler(self)


def show_failure(run: str, why: Explained, lines: Iterable[str]) -> str | None:
    """Attach the artifact `failure` to the flow run and return its address in the UI; None if the server is away."""
    try:
        identity = create_markdown_artifact(
            key=artifact_key(run.lower(), "failure"),
            markdown=failure_text(why, lines),
            description=without_secrets(why.cause).partition("\n")[0][:_LONGEST],
        )
    except (httpx.HTTPError, PrefectException) as error:
        logger.warning("the failure is not among the artifacts, because the server does not answer: %s", error)
        return None
    ui = get_current_settings().ui_url
    return f"{ui}/artifacts/artifact/{identity}" if ui else None


def failure_text(why: Explained, lines: Iterable[str]) -> str:
    """Markdown: cause, stage, first step, effect of Retry, the last lines of the log."""
    rows = [("cause", why.cause), ("stage", why.stage or "none was begun"), ("first", why.first), ("Retry", why.kept)]
    table = [f"| {name} | {text.replace('|', r'\|').replace(chr(10), '<br>')} |" for name, text in rows]
    last = [without_secrets(line).replace("`", "'")[:_LONGEST] for line in lines]
    return "\n".join(["## Why it failed", "", "| | |", "|---|---|", *table, "", "### Last lines", "```", *last, "```"])
