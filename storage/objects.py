"""Object stores: conditional puts, and which failures are worth another try.

s3fs maps what a server answers to errors of the operating system: 412 of a conditional put to FileExistsError, 409
(ConditionalRequestConflict: two puts at once) and 503 to EBUSY, 500 to EREMOTEIO. A retry after an answer that was lost
meets its own object, so callers read back and compare whenever a put finds the key taken.
"""

import errno
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

_ATTEMPTS = 6
_TRANSIENT = {
    errno.EBUSY, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH,
}  # fmt: skip


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
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT or isinstance(error, TimeoutError | ConnectionError)
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.exceptions import HTTPClientError

    return isinstance(error, HTTPClientError | NoConnection)
