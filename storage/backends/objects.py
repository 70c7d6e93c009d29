"""Object stores: conditional puts, and which failures are worth another try.

s3fs maps what a server answers to errors of the operating system: 412 of a conditional put to FileExistsError, 503 to
EBUSY, 500 to EREMOTEIO - but 409 ConditionalRequestConflict (two conditional puts at once: try again) to a bare EIO, so
the status is looked at. A retry after an answer that was lost meets its own object, so callers read back and compare
whenever a put finds the key taken.
"""

import errno
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

_ATTEMPTS = 6
_TRANSIENT = (errno.EBUSY, errno.EREMOTEIO, errno.ECONNRESET)
_TRANSIENT_STATUS = (409, 429, 500, 502, 503, 504)


def put_if_absent(fs: Any, path: str, data: bytes) -> bool:
    """Conditional put of `data`; False if the object is there."""
    return _create(lambda: fs.pipe_file(path, data, mode="create"))


def put_file_if_absent(fs: Any, path: str, source: Path) -> bool:
    """Conditional put of a local file, streamed in several parts if it is large; False if the object is there."""
    return _create(lambda: fs.put_file(str(source), path, mode="create"))


def retried[T](call: Callable[[], T]) -> T:
    """The result of `call`, tried again with growing random pauses while the store says that it is busy or away."""
    for attempt in Retrying(
        retry=retry_if_exception(_is_transient),
        stop=stop_after_attempt(_ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.05, max=2),
        reraise=True,
    ):
        with attempt:
            return call()
    raise AssertionError("tenacity returns or raises")


@functools.cache
def client_errors() -> tuple[type[Exception], ...]:
    """What the S3 client raises beside OSError: no credentials, no endpoint, a broken connection."""
    from botocore.exceptions import BotoCoreError, ClientError  # a local run never loads it

    return BotoCoreError, ClientError


def _create(put: Callable[[], object]) -> bool:
    try:
        retried(put)
    except FileExistsError:
        return False
    return True


def _is_transient(error: BaseException) -> bool:
    # broken connections are not here: s3fs and botocore have tried those again themselves
    if not isinstance(error, OSError):
        return False
    return error.errno in _TRANSIENT or isinstance(error, TimeoutError) or _status(error) in _TRANSIENT_STATUS


def _status(error: OSError) -> int | None:
    """The HTTP status that s3fs made this error from."""
    clients = client_errors() if error.__cause__ is not None else ()
    if not isinstance(error.__cause__, clients):
        return None
    response: dict[str, Any] = vars(error.__cause__).get("response", {})
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
