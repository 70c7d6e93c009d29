"""The Prefect server of one command: the configured one, or a temporary one of our own.

Prefect would start a temporary server by itself, at the first call, while everything else waits. Ours is started
early, on a port that is bound before the process begins, outside the terminal's process group, so that Ctrl-C leaves it
alive until it has the run's last state, and tied to this process by a pipe, so that nothing is left behind."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import httpx
from prefect.client.orchestration import get_client
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

from storage.errors import InputError, WorkerLost
from tasks.config.code_version import PROJECT_ROOT

_ANSWER_S = 15.0
_EARLY_S = 1.0
_DRAIN_S = 5.0
_STOP_S = 3.0  # it has everything by then; its database survives a kill
_STOP_EARLY_S = 30.0  # killed while it makes its tables, it would leave the next start half of them
_STARTS = 4  # of two simultaneous first starts, one finds the new database locked by the migrations of the other
_BACKLOG = 128


def answers(api: str, timeout_s: float) -> bool:
    try:
        return httpx.get(f"{api}/health", timeout=timeout_s).is_success
    except httpx.TransportError:
        return False


def last_output(log: bytes) -> str:
    lines = [line for line in log.decode(errors="replace").splitlines() if line.strip()]
    return f"Its last output: {' | '.join(lines[-3:]) or 'none'}."


class TemporaryServer(contextlib.AbstractContextManager["TemporaryServer", None]):
    """A Prefect server on 127.0.0.1 that lives as long as this process at most."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._ready = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/api"
        self._process = _spawn(self._listener, self._log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> None:
        """Return when the server answers. Raises WorkerLost if it ended, or did not answer within `seconds`."""
        deadline, starts = time.monotonic() + seconds, 1
        # the socket already listens, so an early request waits in the queue instead of being refused
        while not answers(self.url, _EARLY_S):
            if time.monotonic() > deadline:
                raise self._failed(f"did not answer within {seconds:g} s")
            if self._process.poll() is None:
                continue
            if starts == _STARTS:
                raise self._failed("cannot start")
            self._process, starts = _spawn(self._listener, self._log), starts + 1
        self._listener.close()  # from now on a request to a dead server is refused instead of waiting
        self._ready = True

    def ask_to_stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> None:
        self.ask_to_stop()
        try:
            self._process.wait(_STOP_S if self._ready else _STOP_EARLY_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.close()
        self._log.close()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _failed(self, how: str) -> WorkerLost:
        self._log.seek(0)
        fact = f"the temporary Prefect server {how}. {last_output(self._log.read())}"
        repair = (
            "Set PREFECT_API_URL to a server of your own, or PREFECT_HOME to a new folder if the database belongs to"
        )
        return WorkerLost(f"{fact} {repair} another version of Prefect")


@contextlib.contextmanager
def prefect_server() -> Iterator[TemporaryServer | None]:
    """Begin to start a temporary server, or check the configured one (then the block gets None). Raises InputError if
    that one does not answer."""
    configured = get_current_settings().api.url
    if configured:
        _check_configured(configured)
        yield None
        return
    with TemporaryServer() as server:
        yield server


@contextlib.contextmanager
def connected(server: TemporaryServer | None) -> Iterator[None]:
    """Let Prefect use `server` as soon as it answers; at the end, wait until it has received everything. Raises
    WorkerLost if it does not start, or stopped answering during the block."""
    with contextlib.ExitStack() as stack:
        if server is not None:
            server.wait(get_current_settings().server.ephemeral.startup_timeout_seconds)
            stack.callback(server.ask_to_stop)
            stack.enter_context(temporary_settings({PREFECT_API_URL: server.url}))
        stack.callback(drain)
        try:
            yield
        except httpx.TransportError as error:
            fact = f"the Prefect server stopped answering during the run ({error})"
            raise WorkerLost(f"{fact}. Nothing that was committed is lost") from error


def drain() -> None:
    """Wait, for a limited time, until Prefect's server has all events and log lines of this process."""
    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=_DRAIN_S)


def _spawn(listener: socket.socket, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "flows.server.process", str(listener.fileno())]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=PROJECT_ROOT, pass_fds=[listener.fileno()],
        start_new_session=True,
    )  # fmt: skip


def _check_configured(url: str) -> None:
    once = temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0})
    with once, get_client(sync_client=True, httpx_settings={"timeout": _ANSWER_S}) as client:
        error = client.api_healthcheck()
    if error is not None:
        fact = f"the configured Prefect server {url} does not answer ({type(error).__name__}: {error})"
        raise InputError(f"{fact}: start it, correct PREFECT_API_URL, or unset it to use a temporary server")
