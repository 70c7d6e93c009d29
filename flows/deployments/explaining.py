"""Why a flow run is red, for a person who reads its page and decides whether to press Retry."""

from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Failed

from storage.errors import (
    DigestMismatch,
    InputError,
    NumericsError,
    PartMissing,
    RatchetError,
    StageFailed,
    StorageInterrupted,
    StorageUnavailable,
    SyncMismatch,
    WorkerLost,
    told,
)
from tasks.config.credentials import shown_text
from tasks.config.environment import without_secrets

_FULL = ("out of memory", "outofmemory")
_MEMORY = (
    "A rank or an engine needs more memory than there is: lower train.micro_batch_size or train.micro_batch_tokens, or "
    "engine.gpu_memory_utilization and engine.max_num_seqs; none of them changes what the run means. Do it in the "
    "file that the flow run was given and press Retry, or start another flow run with `settings`."
)
_NOTES = (
    (StorageUnavailable, "The store refuses: correct permission, space or address first, then press Retry."),
    (InputError, "Retry alone cannot help: correct what is named, then start again with it or press Retry."),
    (StorageInterrupted, "The store did not answer for long: press Retry once it does."),
    (WorkerLost, "A process was lost more often than it is replaced without a person: press Retry to try again. If it "
     "is always the same stage, look for its cause first: memory of the card or of the host, the process's own log."),
    (NumericsError, "The numbers are not finite, and would be so again: change the learning rate, precision or data."),
    (SyncMismatch, "The engine does not hold what was trained: raise the limits in [sync] only if you know why."),
    (StageFailed, "Correct what is named, then press Retry."),
    ((DigestMismatch, PartMissing), "What is stored is damaged: `ratchet verify` names it. Retry does not repair it."),
)  # fmt: skip


def failed(error: RatchetError, run: str, root: str) -> State[Any]:
    """The end of a flow run that an error stopped; it is logged, with a traceback unless the input was at fault."""
    traceback = None if isinstance(error, InputError) else error
    get_run_logger().error("%s", without_secrets(str(error)), exc_info=traceback)
    return Failed(message=explained(error, run, root))


def explained(error: RatchetError, run: str, root: str) -> str:
    """Stage and cause, what is kept, what Retry does, and what to change first."""
    advice = next((text for kind, text in _NOTES if isinstance(error, kind)), "Press Retry to continue.")
    if isinstance(error, WorkerLost) and any(words in str(error).lower() for words in _FULL):
        advice = _MEMORY
    place = "" if error.during is None or error.during in str(error) else f"During {error.during}: "
    return "\n\n".join(
        [
            without_secrets(f"{place}{told(error)}"),
            f"Everything that was committed is kept in {shown_text(root)}/{run}; Retry repeats only the stage that "
            "failed, from what it has stored, and goes on.",
            advice,
        ]
    )
