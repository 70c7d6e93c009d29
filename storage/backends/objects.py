"""Object stores: conditional puts, multipart uploads, and which failures are worth a retry.

s3fs maps a server's answers to errors of the operating system: 503 to EBUSY, 500 to EREMOTEIO, but 409
ConditionalRequestConflict (two conditional puts at once: retry) to a bare EIO, and the 412 of a conditional put to
FileExistsError only if the body is Amazon's (Ceph's differs). So the status itself is checked. A retry after a lost
answer finds its own object, so callers read back and compare whenever the key is taken."""

import errno
import functools
import http
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa

from storage import kill_points
from storage.backends.backend import Backend, Stored, Upload
from storage.kill_points import Point

CLIENT_CONFIG = {"retries": {"mode": "standard", "total_max_attempts": 2}}
"""botocore's own attempts, which multiply ours: two, so that a long upload survives a lost request."""

_ONE_COPY = 5 * 2**30  # bytes: S3 copies larger objects in several requests, which make a new object in any case
_TEMPORARY = (
    errno.EBUSY, errno.EREMOTEIO, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE,
    errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN,
)  # fmt: skip
_TEMPORARY_STATUS = (408, 409, 429, 500, 502, 503, 504)


class ObjectStore(Backend):
    """The objects of a bucket below a prefix, by way of an fsspec filesystem such as s3fs."""

    def __init__(self, url: str, options: dict[str, Any] | None = None, fs: Any = None) -> None:
        self.url = url.rstrip("/")
        # an object written by another process must be seen at once: no listing cache
        given = {"use_listings_cache": False, "config_kwargs": CLIENT_CONFIG} | (options or {})
        self.fs = fsspec.filesystem("s3", **given) if fs is None else fs
        self.path = self.url.partition("://")[2]
        self.failures = client_errors()

    def full(self, key: str) -> str:
        return f"{self.path}/{key}"

    def put_if_absent(self, key: str, data: memoryview, durable: bool) -> bool:
        kill_points.reached(Point.MID_PART, key)
        return _created(lambda: self.fs.pipe_file(self.full(key), bytes(data), mode="create"))

    def put_file_if_absent(self, key: str, source: Path) -> bool:
        """A conditional put; of a large file, a multipart upload whose end is conditional."""
        return _created(lambda: self.fs.put_file(str(source), self.full(key), mode="create"))

    def copy(self, source: str, key: str) -> None:
        self.fs.cp_file(self.full(source), self.full(key))

    def touch(self, key: str) -> None:
        """Copy an object onto itself within the store. S3 refuses that unless something changes, such as metadata."""
        path = self.full(key)
        small = self.fs.info(path)["size"] <= _ONE_COPY
        self.fs.cp_file(path, path, **({"MetadataDirective": "REPLACE"} if small else {}))

    def replace(self, key: str, data: memoryview) -> None:
        self.fs.pipe_file(self.full(key), bytes(data))

    def read(self, key: str) -> bytes:
        """One request: otherwise s3fs asks for the size first, to fetch a large object in several."""
        return self.fs.cat_file(self.full(key), max_concurrency=1)

    def view(self, key: str) -> pa.Buffer:
        return pa.py_buffer(self.fs.cat_file(self.full(key)))

    def download(self, key: str, target: Path) -> None:
        self.fs.get_file(self.full(key), str(target))

    def remove(self, key: str) -> None:
        self.fs.rm_file(self.full(key))

    def info(self, key: str) -> Stored | None:
        try:
            found = self.fs.info(self.full(key))
        except FileNotFoundError:
            return None
        return Stored(key, found["size"], _modified(found)) if found["type"] == "file" else None

    def stored(self, prefix: str) -> Iterator[Stored]:
        # as `prefix`: for a path without objects s3fs would ask twice more whether it is an object
        try:
            found = self.fs.find(self.path, detail=True, **({"prefix": f"{prefix}/"} if prefix else {}))
        except FileNotFoundError:
            return
        for name, info in found.items():
            yield Stored(name.removeprefix(self.path).lstrip("/"), info["size"], _modified(info))

    def folders(self, prefix: str) -> list[str]:
        try:
            found = self.fs.ls(self.full(prefix) if prefix else self.path, detail=True)
        except FileNotFoundError:
            return []
        return [info["name"].rstrip("/").rsplit("/", 1)[-1] for info in found if info["type"] == "directory"]

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Their keys begin with the bucket."""
        bucket, _, folder = self.full(prefix).rstrip("/").partition("/")
        where: dict[str, str] = {"Bucket": bucket, "Prefix": f"{folder}/" if folder else ""}
        while True:
            page = self.fs.call_s3("list_multipart_uploads", **where)
            for one in page.get("Uploads", ()):
                yield Upload(f"{bucket}/{one['Key']}".removeprefix(f"{self.path}/"), one["UploadId"], one["Initiated"])
            if not page.get("IsTruncated"):
                return
            where |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort_upload(self, key: str, upload: str) -> None:
        bucket, _, name = self.full(key).partition("/")
        self.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=name, UploadId=upload)

    def is_temporary(self, error: BaseException) -> bool:
        if isinstance(error, (TimeoutError, *_connection_errors())):
            return True
        return isinstance(error, OSError) and (error.errno in _TEMPORARY or _status(error) in _TEMPORARY_STATUS)


@functools.cache
def client_errors() -> tuple[type[Exception], ...]:
    """Exceptions of the S3 client besides OSError: no credentials, no endpoint, a broken connection."""
    from botocore.exceptions import BotoCoreError, ClientError  # not needed by a local run

    return BotoCoreError, ClientError, *_connection_errors()


def url_errors(url: str) -> tuple[type[Exception], ...]:
    """Errors that fsspec raises about a place that cannot be reached, read or written."""
    return OSError, ImportError, ValueError, *(client_errors() if url.startswith("s3") else ())


@functools.cache
def _connection_errors() -> tuple[type[Exception], ...]:
    from aiohttp import ClientError as ConnectionFailed
    from botocore.exceptions import ConnectionError as NotConnected
    from botocore.exceptions import HTTPClientError, IncompleteReadError
    from botocore.parsers import ResponseParserError  # a proxy in front of the store answered, not in XML

    return NotConnected, HTTPClientError, IncompleteReadError, ResponseParserError, ConnectionFailed


def _created(put: Callable[[], object]) -> bool:
    try:
        put()
    except FileExistsError:
        return False
    except OSError as error:
        if _status(error) != http.HTTPStatus.PRECONDITION_FAILED:
            raise
        return False
    return True


def _modified(info: dict[str, Any]) -> datetime:
    value = info["LastModified"] if "LastModified" in info else info["created"]
    return value if isinstance(value, datetime) else datetime.fromtimestamp(value, UTC)


def _status(error: OSError) -> int | None:
    """The HTTP status that s3fs made this error from."""
    clients = client_errors() if error.__cause__ is not None else ()
    if not isinstance(error.__cause__, clients):
        return None
    response: dict[str, Any] = vars(error.__cause__).get("response", {})
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
