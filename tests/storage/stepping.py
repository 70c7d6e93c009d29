"""Processes that share a store and are moved by hand, one store operation at a time; any can be killed anywhere."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from storage.backends.root import Root
from tests.storage.flaky import object_store


class Killed(BaseException):
    """Raised in a killed process at its next store operation; none of its later operations reaches the store."""


class Stepper:
    """A function that runs in a thread, but only during `step`, for at most one store operation."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self._turn, self._back = function, threading.Semaphore(0), threading.Semaphore(0)
        self._killed, self.ended, self.error = False, False, None
        self.pausing = False
        """True at a point of interest: just before a write, or while it waits for time to pass."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Let it run until just before or just after its next store operation, or to its end."""
        if not self.ended:
            self._turn.release()
            self._back.acquire()

    def step_to_write(self) -> None:
        """Let it run until just before its next write, when its knowledge may become outdated, or until it waits."""
        self.step()
        while not (self.pausing or self.ended):
            self.step()

    def kill(self) -> None:
        """Kill it as by SIGKILL: none of its later operations reaches the store."""
        self._killed = True
        while not self.ended:
            self.step()
        self._thread.join()

    def gate(self, pausing: bool = False) -> None:
        """Wait for a step; the store calls this before each operation, and after those that write."""
        self.pausing = pausing
        self._back.release()
        self._turn.acquire()
        if self._killed:
            raise Killed

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._killed:
                self._function()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the test, which fails with it
            self.error = error
        finally:
            self.ended = True
            self._back.release()


class SharedStore:
    """An object store with conditional puts that keeps a record of every write."""

    def __init__(self) -> None:
        self.inner = MemoryFileSystem(skip_instance_cache=True)
        self.inner.store, self.inner.pseudo_dirs = {}, [""]
        self.writes: list[tuple[str, bytes]] = []

    def root(self, stepper: Callable[[], Stepper] | None = None) -> Root:
        """The store as one process sees it; ungated for the test itself."""
        return Root("s3://shared/runs", object_store(GatedFileSystem(self, stepper), "/shared/runs"))


class GatedFileSystem:
    """The store's calls for a process; each can be the last."""

    def __init__(self, store: SharedStore, stepper: Callable[[], Stepper] | None) -> None:
        self._store, self._stepper = store, stepper

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        self._gate(pausing=True)
        if mode == "create" and self._store.inner.exists(path):
            raise FileExistsError(path)
        self._store.inner.pipe_file(path, data)
        self._store.writes.append((path, data))
        self._gate()

    def put_file(self, source: str, path: str, mode: str = "overwrite") -> None:
        self.pipe_file(path, Path(source).read_bytes(), mode)

    def cat_file(self, path: str, **_: Any) -> bytes:
        self._gate()
        return self._store.inner.cat_file(path)

    def exists(self, path: str) -> bool:
        self._gate()
        return self._store.inner.exists(path)

    def find(self, path: str, detail: bool, prefix: str = "") -> dict[str, Any]:
        self._gate()
        return self._store.inner.find(f"{path}/{prefix}".rstrip("/"), detail=detail)

    def info(self, path: str) -> dict[str, Any]:
        self._gate()
        return self._store.inner.info(path)

    def cp_file(self, path: str, target: str, **_: Any) -> None:
        self._gate(pausing=True)
        self._store.inner.cp_file(path, target)
        self._gate()

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        self._gate()
        return self._store.inner.ls(path, detail=detail)

    def rm_file(self, path: str) -> None:
        self._gate(pausing=True)
        self._store.inner.rm_file(path)
        self._gate()

    def call_s3(self, _: str, **__: Any) -> dict[str, Any]:
        return {}  # no uploads in parts are in progress

    def _gate(self, pausing: bool = False) -> None:
        if self._stepper is not None:
            self._stepper().gate(pausing)
