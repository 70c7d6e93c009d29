"""Object stores: conditional puts, multipart uploads, and which failures are worth a retry.

s3fs maps a server's answers to errors of the operating system: 503 to EBUSY, 500 to EREMOTEIO, but 409
ConditionalRequestConflict (two conditional puts at once: retry) to a bare EIO, and the 412 of a conditional put to
FileExistsError only if the body is Amazon's (Ceph's differs). So the status itself is checked. A retry after a lost
answer finds its own object, so callers read back and compare whenever the key is taken.
"""

import errno
import functools
import http
import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, stop_all, stop_before_delay
from tenacity import wait_random_exponential as wait_random

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long an operation is retried while the store is busy or does not answer."""

LARGE_ATTEMPTS = 4
"""Least number of attempts at a transfer, which may itself take longer than PATIENCE_SECONDS."""

CLIENT_CONFIG = {"retries": {"mode": "standard", "total_max_attempts": 2}}
"""botocore's own attempts, which multiply ours: two, so that a long upload survives a lost request."""

_LONGEST_PAUSE = 5.0
_SILENT_S = 5.0  # shorter outages are nobody's concern
_ONE_COPY = 5 * 2**30  # bytes: S3 copies larger objects in several requests, which make a new object in any case
_TEMPORARY = (
    errno.EBUSY, errno.EREMOTEIO, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE,
    errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN,
)  # fmt: skip
_TEMPORARY_STATUS = (408, 409, 429, 500, 502, 503, 504)


class Upload(NamedTuple):
    """A multipart upload that was neither finished nor aborted. It costs money and is in no listing of objects."""

    key: str
    """Key of the object that it was to become."""
    id: str
    """The store's id of it."""
    started: datetime
    """When it began, by the store's clock."""


def put_if_absent(fs: Any, path: str, data: bytes, patience: float) -> bool:
    """Conditional put of `data`; False if the object is there."""
    return _create(lambda: fs.pipe_file(path, data, mode="create"), patience, 1)


def put_file_if_absent(fs: Any, path: str, source: Path, patience: float) -> bool:
    """Conditional put of a local file, a multipart upload if it is large; False if the object is there."""
    return _create(lambda: fs.put_file(str(source), path, mode="create"), patience, LARGE_ATTEMPTS)


def make_young(fs: Any, path: str) -> None:
    """Copy an object onto itself within the store. S3 refuses that unless something changes, such as metadata."""
    small = fs.info(path)["size"] <= _ONE_COPY
    fs.cp_file(path, path, **({"MetadataDirective": "REPLACE"} if small else {}))


def uploads(fs: Any, path: str, patience: float) -> Iterator[Upload]:
    """Unfinished multipart uploads below the folder `path` (bucket/prefix); their keys begin with the bucket."""
    bucket, _, prefix = path.partition("/")
    where: dict[str, str] = {"Bucket": bucket, "Prefix": f"{prefix}/" if prefix else ""}
    while True:
        page = retried(functools.partial(fs.call_s3, "list_multipart_uploads", **where), is_temporary, patience)
        for one in page.get("Uploads", ()):
            yield Upload(f"{bucket}/{one['Key']}", one["UploadId"], one["Initiated"])
        if not page.get("IsTruncated"):
            return
        where |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def abort_upload(fs: Any, path: str, upload_id: str, patience: float) -> None:
    """Make the store drop what an upload has stored; FileNotFoundError if there is no such upload."""
    bucket, _, key = path.partition("/")
    call = functools.partial(fs.call_s3, "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)
    retried(call, is_temporary, patience)


def retried[T](
    call: Callable[[], T], temporary: Callable[[BaseException], bool], patience: float, attempts: int = 1
) -> T:
    """The result of `call`, retried with growing random pauses after each failure that is `temporary`.

    Args:
        patience: seconds after which it is not retried.
        attempts: least number of attempts.
    """
    for attempt in Retrying(
        retry=retry_if_exception(temporary),
        stop=stop_all(stop_after_attempt(attempts), stop_before_delay(patience)),
        wait=wait_random(multiplier=0.05, max=_LONGEST_PAUSE),
        before_sleep=_OutageSaid(patience),
        reraise=True,
    ):
        with attempt:
            return call()
    raise AssertionError("tenacity returns or raises")


class _OutageSaid:
    """Says once that an operation waits for the store."""

    def __init__(self, patience: float) -> None:
        self._patience, self._said = patience, False

    def __call__(self, state: RetryCallState) -> None:
        """Called before each pause."""
        if self._said or state.outcome is None or (state.seconds_since_start or 0.0) < _SILENT_S:
            return
        self._said = True
        cause = type(state.outcome.exception()).__name__
        logger.warning("the store does not answer (%s): waiting for it, up to %g s", cause, self._patience)


def is_temporary(error: BaseException) -> bool:
    """Whether the store is busy or away, so that the same request may succeed later."""
    if isinstance(error, (TimeoutError, *_connection_errors())):
        return True
    return isinstance(error, OSError) and (error.errno in _TEMPORARY or _status(error) in _TEMPORARY_STATUS)


@functools.cache
def client_errors() -> tuple[type[Exception], ...]:
    """What the S3 client raises besides OSError: no credentials, no endpoint, a broken connection."""
    from botocore.exceptions import BotoCoreError, ClientError  # not needed by a local run

    return BotoCoreError, ClientError, *_connection_errors()


@functools.cache
def _connection_errors() -> tuple[type[Exception], ...]:
    from aiohttp import ClientError as ConnectionFailed
    from botocore.exceptions import ConnectionError as NotConnected
    from botocore.exceptions import HTTPClientError, IncompleteReadError
    from botocore.parsers import ResponseParserError  # a proxy in front of the store answered, not in XML

    return NotConnected, HTTPClientError, IncompleteReadError, ResponseParserError, ConnectionFailed


def _create(put: Callable[[], object], patience: float, attempts: int) -> bool:
    try:
        retried(put, is_temporary, patience, attempts)
    except FileExistsError:
        return False
    except OSError as error:
        if _status(error) != http.HTTPStatus.PRECONDITION_FAILED:
            raise
        return False
    return True


def _status(error: OSError) -> int | None:
    """The HTTP status that s3fs made this error from."""
    clients = client_errors() if error.__cause__ is not None else ()
    if not isinstance(error.__cause__, clients):
        return None
    response: dict[str, Any] = vars(error.__cause__).get("response", {})
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
