"""The page of a run's flow run while it goes on: what is being done, the last iterations, and what a server missed.
A thread of its own talks to the server, at most every few seconds, and shows what is newest then."""

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Self
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Running

from flows.views.artifacts import WINDOW, Shown, artifact_key, away_text, iteration_table, this_flow_run, viewer_text
from flows.views.history import IterationRecord
from flows.views.progress import portion_text
from tasks.stages.context import Portion
from tasks.stages.names import Stage

EVERY_S = 3.0  # least time between two updates of the page

_LATE_S = 20.0  # no answer for so long counts as away
_END_S = 5.0
_INTERRUPTED_S = 1.0

Say = Callable[[str], object]


class LivePage:
    """Make it within the run's flow; as a context manager it shows the last state at the end, if the server answers."""

    def __init__(
        self, run: str, root: str, iterations: int, say: Say, every_s: float = EVERY_S, viewer: str | None = None
    ) -> None:
        self._run, self._root, self._last, self._say, self._every_s = run, root, iterations, say, every_s
        self._viewer = viewer
        self._flow_run = this_flow_run()
        self._progress = Shown(artifact_key(run, "progress"), "progress")
        self._table = Shown(artifact_key(run, "iterations"), "table")
        self._links = Shown(artifact_key(run, "viewer"), "markdown")
        self._window: deque[IterationRecord] = deque(maxlen=WINDOW)
        self._doing, self._percent, self._told = "starting", 0.0, ("", 0.0)
        self._rows, self._rows_told, self._links_told = 0, 0, -1
        self._away: datetime | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        work = contextvars.copy_context()
        self._thread = threading.Thread(target=work.run, args=(self._work,), name="page", daemon=True)

    def begins(self, iteration: int, stage: Stage) -> None:
        self._doing, self._percent = f"iteration {iteration} of {self._last}: {stage}", 0.0

    def advanced(self, portion: Portion) -> None:
        self._doing = f"iteration {portion.iteration} of {self._last}: {portion_text(portion)}"
        self._percent = 100.0 * portion.done / max(portion.of, 1)

    def finished(self, record: IterationRecord) -> None:
        with self._lock:
            self._window.append(record)
            self._rows += 1

    def window(self) -> list[IterationRecord]:
        with self._lock:
            return list(self._window)

    def is_away(self) -> bool:
        """True if the server did not answer the last request."""
        return self._away is not None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._doing, self._percent = f"{self._last} of {self._last} iterations are done", 100.0
        elif isinstance(error, Exception):
            self._doing = f"failed in {self._doing}"
        else:
            self._doing = f"interrupted in {self._doing}"
        self._ended.set()
        self._thread.join(_END_S if isinstance(error, Exception | None) else _INTERRUPTED_S)

    def _work(self) -> None:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # this thread itself tries again
            while not self._ended.is_set():
                self._talk()
                self._ended.wait(self._every_s)

    def _talk(self) -> None:
        """Show what is new every few seconds, until the end or until the server does not answer."""
        try:
            with get_client(sync_client=True, httpx_settings={"timeout": _LATE_S}) as client:
                while not self._ended.wait(self._every_s):
                    self._show(client)
                self._show(client)
        except (httpx.HTTPError, PrefectException, OSError):
            if self._away is None:
                self._away = datetime.now(UTC)

    def _show(self, client: SyncPrefectClient) -> None:
        if self._away is not None:
            self._back(client, self._away)
        now = (self._doing, self._percent)
        if now != self._told:
            self._progress.show(client, self._flow_run, round(now[1], 1), now[0])
            self._told = now
        rows, window = self._rows, self.window()
        if rows != self._rows_told:
            text = f"Iterations of run {self._run}, the last {WINDOW} at most"
            self._table.show(client, self._flow_run, iteration_table(window, self._root, self._run), text)
            self._rows_told = rows
        if self._viewer is not None and rows != self._links_told:
            text = viewer_text(self._viewer, self._run, self._root, window)
            self._links.show(client, self._flow_run, text, f"Run {self._run} in the viewer")
            self._links_told = rows

    def _back(self, client: SyncPrefectClient, since: datetime) -> None:
        """Tell the person who looks at the page, by the flow run's state and by an artifact."""
        until = datetime.now(UTC)
        text = away_text(self._run, self._root, since, until, self.window())
        Shown(artifact_key(self._run, "server-away"), "markdown").show(client, self._flow_run, text, "What was missed")
        if self._flow_run is not None:
            text = f"the server was away from {since:%H:%M:%S} to {until:%H:%M:%S} UTC; the work went on"
            _annotate(client, self._flow_run, f"{text}, and task runs of that time may be missing")
        self._away = None
        self._say(f"the Prefect server was away from {since:%H:%M:%S} UTC and is back; the work went on")


def _annotate(client: SyncPrefectClient, flow_run: UUID, message: str) -> None:
    """Say something in the state of a flow run that is running; any other state is left alone.

    Not by force: the server then refuses it if the flow run has been cancelled since it was read, and the new state
    keeps the lease on the deployment's concurrency limit.
    """
    state = client.read_flow_run(flow_run).state
    if state is not None and state.is_running():
        client.set_flow_run_state(flow_run, Running(message=message))
