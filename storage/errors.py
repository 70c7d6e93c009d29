"""Every error that Ratchet raises on purpose. A message names the fact, the value and the repair."""

import sysconfig
import traceback
from pathlib import Path

_OURS = Path(__file__).parents[1]
_NOT_THEIRS = (
    "<",  # frozen modules of Python
    *(f"{_OURS / name}/" for name in ("flows", "tasks", "trainer_core", "storage")),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


class RatchetError(Exception):
    """Base of all errors; the command line prints the message and exits with `exit_code`, without a stack trace."""

    exit_code = 1
    beside: str | None = None  # another failure, which happened beside this one and would otherwise be hidden by it
    during: str | None = None  # the work and its stage that were under way, if known


def user_line(error: BaseException) -> str:
    """The last line of a user's own file that led to an error, as ` (name.py, line 3)`; empty if none did, and for a
    syntax error, whose text names it."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_NOT_THEIRS)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def told(error: RatchetError) -> str:
    """The message of an error, and of the failure beside it."""
    return str(error) if error.beside is None else f"{error}\n{error.beside}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


class InputError(RatchetError):
    """The user's input cannot work. Raised before expensive work where possible."""

    exit_code = 2


class StorageError(RatchetError):
    """The store refused an operation, or failed at it."""


class StorageUnavailable(StorageError, InputError):
    """The store cannot be written or read at all: permission, disk full, missing bucket."""

    exit_code = 2


class StorageInterrupted(StorageError):
    """The store did not answer during all retries of an operation; the same operation may succeed later. An outage, a
    refused connection, an overloaded server. Whether the operation took effect is not known."""


class NotCommitted(StorageError):
    """The requested manifest of a stage is not there: the stage did not happen."""


class CommitConflict(StorageError):
    """Another writer has committed the same stage with other content."""


class Overtaken(CommitConflict):
    """The stage was committed by the process that drove the run before this one; its result is the one that counts."""


class DigestMismatch(StorageError):
    """Bytes read differ from the digest that the manifest records."""

    exit_code = 2


class WrongRecord(DigestMismatch):
    """A record is missing, or is not the one that was written in its place: lost, copied or moved by hand."""


class PartMissing(StorageError):
    """A manifest names a part that is not there: lost, or removed by retention."""

    exit_code = 2


class LeaseHeld(StorageError):
    """Another process drives the run."""

    exit_code = 2


class LeaseLost(StorageError):
    """This process no longer drives the run: its lease was taken over, or ended by `ratchet unlock`."""


class SchemaMismatch(StorageError):
    """A part or manifest was written under a schema or format that this version cannot read."""

    exit_code = 2


class AccumulationPending(RatchetError):
    """Gradients that no update has used yet cannot be dropped."""


class StageFailed(RatchetError):
    """A stage's result is not acceptable, so nothing was committed."""


class SyncMismatch(StageFailed):
    """The engine does not hold exactly the weights that the trainer sent."""


class WorkerLost(RatchetError):
    """A process of the run (trainer rank, engine, Ray) died or does not answer; the next attempt starts a new one."""


class OutOfMemory(WorkerLost):
    """A process of the run needs more memory of its card or host than there is."""


class NumericsError(StageFailed):
    """A loss or gradient norm is not finite; the optimizer update was not applied."""
