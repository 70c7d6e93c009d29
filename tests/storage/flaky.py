"""Stores that misbehave in the ways real ones do."""

import errno
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from storage.backends.objects import ObjectStore
from storage.backends.root import Root

FAULTS = {
    "busy": OSError(errno.EBUSY, "ConditionalRequestConflict"),
    "server error": OSError(errno.EREMOTEIO, "InternalError"),
    "timeout": TimeoutError("RequestTimeout"),
    "reset": ConnectionResetError(errno.ECONNRESET, "connection reset by peer"),
    "disk full": OSError(errno.ENOSPC, "no space left on device"),
    "denied": PermissionError(errno.EACCES, "AccessDenied"),
}


class FlakyFileSystem:
    """An object store of this process with conditional puts, whose calls fail as a script says.

    The script names the outcome of each writing call in turn: a fault of FAULTS before anything is done; "lost X" for
    fault X after the work is done, so that only the answer is lost; "torn" for half an object and then an error;
    "slow"; or "ok". After its end every call works.
    """

    def __init__(self, script: Iterable[str] = (), reading: Iterable[str] = ()) -> None:
        self.inner = MemoryFileSystem(skip_instance_cache=True)
        self.inner.store, self.inner.pseudo_dirs = {}, [""]  # not the store that all instances share
        self.script, self.reading = iter(script), iter(reading)
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        self.calls["pipe_file"] += 1
        step = next(self.script, "ok")
        if step == "slow":
            time.sleep(0.02)
        if step in FAULTS:
            raise FAULTS[step]
        with self._lock:
            if mode == "create" and self.inner.exists(path):
                raise FileExistsError(path)
            self.inner.pipe_file(path, data[: len(data) // 2] if step == "torn" else data)
        if step == "torn":
            raise FAULTS["reset"]
        if step.startswith("lost "):
            raise FAULTS[step.removeprefix("lost ")]

    def put_file(self, source: str, path: str, mode: str = "overwrite") -> None:
        self.pipe_file(path, Path(source).read_bytes(), mode)

    def cat_file(self, path: str, **_: Any) -> bytes:
        self.calls["cat_file"] += 1
        step = next(self.reading, "ok")
        if step in FAULTS:
            raise FAULTS[step]
        return self.inner.cat_file(path)

    def find(self, path: str, detail: bool, prefix: str = "") -> dict[str, Any]:
        return self.inner.find(f"{path}/{prefix}".rstrip("/"), detail=detail)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def flaky_root(script: Iterable[str] = (), reading: Iterable[str] = (), patience: float = 60) -> Root:
    """A root on a FlakyFileSystem, treated as S3."""
    return Root("s3://flaky/runs", object_store(FlakyFileSystem(script, reading), "/flaky/runs"), patience)


def object_store(fs: Any, path: str) -> ObjectStore:
    """A backend as for S3, on another filesystem with conditional puts."""
    backend = ObjectStore(f"s3:/{path}", fs=fs)
    backend.path = path  # the memory of fsspec begins its paths with a slash
    return backend
