"""Explanation of a red flow run, for a person who reads its page and decides whether to press Retry."""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.exceptions import PrefectException
from prefect.settings import get_current_settings

from flows.views.artifacts import artifact_key
from storage import errors
from tasks.config.credentials import shown_text
from tasks.config.environment import without_secrets

logger = logging.getLogger(__name__)

_LINES = 20
_LONGEST = 500
_LOGGER = "prefect.flow_runs"

_MEMORY = (
    "A rank or an engine needs more memory than there is: lower train.micro_batch_size or train.micro_batch_tokens, or "
    "engine.gpu_memory_utilization and engine.max_num_seqs; none of them changes what the run means. Do it in the "
    "file that the flow run was given and press Retry, or start another flow run with `settings`."
)
_CORRECT = "Retry alone cannot help: correct what is named, then start again with it or press Retry."
_DAMAGED = "What is stored is damaged: `ratchet verify` names it. Retry does not repair it."
_REFUSES = "The store refuses: correct permission, space or address first, then press Retry."
_LOST = (
    "A process was lost more often than it is replaced without a person: press Retry to try again. If it is always the "
    "same stage, look for its cause first: memory of the card or of the host, the process's own log."
)
_NUMERICS = "The numbers are not finite, and would be so again: change the learning rate, precision or data."
_DIFFERS = "The engine does not hold what was trained: raise the limits in [sync] only if you know why."
_NOTES: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str, bool], ...] = (
    (errors.StorageUnavailable, _REFUSES, False),
    (errors.InputError, _CORRECT, False),
    (errors.StorageInterrupted, "The store did not answer for long: press Retry once it does.", True),
    ((errors.OutOfMemory, MemoryError), _MEMORY, False),
    (errors.WorkerLost, _LOST, True),
    (errors.NumericsError, _NUMERICS, False),
    (errors.SyncMismatch, _DIFFERS, True),
    (errors.StageFailed, "Correct what is named, then press Retry.", False),
    ((errors.DigestMismatch, errors.PartMissing), _DAMAGED, False),
    (errors.SchemaMismatch, "Continue the run with the version of Ratchet that made it.", False),
)
"""By type of error: the first step, and whether Retry may help without it."""


@dataclass(frozen=True)
class Explained:
    stage: str | None
    """Stage under way; None if no stage was begun."""
    cause: str
    kept: str
    """Stored results, and the effect of Retry."""
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
    table = [f"| {name} | {_cell(text)} |" for name, text in rows]
    last = [without_secrets(line).replace("`", "'")[:_LONGEST] for line in lines]
    return "\n".join(["## Why it failed", "", "| | |", "|---|---|", *table, "", "### Last lines", "```", *last, "```"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
