"""A flow run in Prefect's UI: its artifacts, and what they show while it goes on: the stage, the last iterations, and
what a server missed. A thread of its own talks to the server then, at most every few seconds, and shows the newest."""

import contextvars
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Self
from urllib.parse import quote
from uuid import UUID

import httpx
from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Running

from flows.views.curves import data_uri
from flows.views.history import IterationRecord
from flows.views.output import figure, rounded
from flows.views.progress import figures_of, portion_text
from flows.views.samples import Samples
from flows.views.status import Change, RunStatus
from storage import layout
from tasks.config.credentials import shown_text
from tasks.stages.context import Portion
from tasks.stages.names import Stage

WINDOW = 100  # iterations in a table: the last ones. All of them are in the run's metrics file.

_FIGURES = ("reward", "held_out_reward", "pass_rate", "kl", "entropy", "grad_norm", "tokens_per_second", "seconds")
_LONGEST = 2000  # characters of a text in a table
_TITLES = {"held_out_reward": "held-out reward", "pass_rate": "held-out pass rate", "kl": "KL before||after"}

EVERY_S = 3.0  # least time between two updates of the page

_LATE_S = 20.0  # no answer for so long counts as away
_END_S = 5.0
_INTERRUPTED_S = 1.0

Say = Callable[[str], object]


class Shown:
    """One artifact of a flow run, which is changed instead of made again: the server's database does not grow."""

    def __init__(self, key: str, kind: str) -> None:
        self._key, self._kind = key, kind
        self._made: UUID | None = None
        self._asked = False

    def show(self, client: SyncPrefectClient, flow_run: UUID | None, data: Any, description: str) -> None:
        content = json.dumps(data) if self._kind == "table" else data
        if self._asked and self._made is None:  # the server may have made it, and its answer been lost
            self._made = _made_before(client, flow_run, self._key)
        self._asked = True
        if self._made is None:
            place = {"key": self._key, "type": self._kind, "flow_run_id": flow_run}
            order = ArtifactCreate(data=content, description=description, **place)
            self._made = client.create_artifact(order).id
        else:
            client.update_artifact(self._made, ArtifactUpdate(data=content, description=description))


def _made_before(client: SyncPrefectClient, flow_run: UUID | None, key: str) -> UUID | None:
    of_run = ArtifactFilterFlowRunId(any_=None if flow_run is None else [flow_run])
    chosen = ArtifactFilter(flow_run_id=of_run, key=ArtifactFilterKey(any_=[key]))
    return next((one.id for one in client.read_artifacts(artifact_filter=chosen, limit=1)), None)


def publish(status: RunStatus, png: bytes) -> None:
    run = status.run
    rows, text = iteration_table(status.history[-WINDOW:], status.root, run), f"the last {WINDOW} at most"
    create_table_artifact(rows, key=artifact_key(run, "iterations"), description=f"Iterations of run {run}, {text}")
    create_markdown_artifact(summary(status), key=artifact_key(run, "summary"), description=f"Summary of run {run}")
    create_image_artifact(data_uri(png), key=artifact_key(run, "curves"), description=f"Curves of run {run}")


def examples_publisher(run: str) -> Callable[[Samples], None]:
    """Shows examples of an iteration on the current flow run, those of the last one; for one other thread."""
    context = contextvars.copy_context()  # Prefect finds the flow run in it
    table = Shown(artifact_key(run, "samples"), "table")

    def publish_examples(found: Samples) -> None:
        text = f"Best and worst samples of iteration {found.iteration} of run {found.run}"
        with get_client(sync_client=True) as client:
            table.show(client, this_flow_run(), example_table(found), text)

    return lambda found: context.run(publish_examples, found)


def this_flow_run() -> UUID | None:
    """Identity of the flow run of this context; None outside of one."""
    context = FlowRunContext.get()
    return None if context is None or context.flow_run is None else context.flow_run.id


def example_table(found: Samples) -> list[dict[str, str | float | int | None]]:
    return [
        {
            "iteration": found.iteration, "sample": f"{one.prompt_id}/{one.sample_id}",
            "prompt": _cut(one.prompt), "response": _cut(one.response), "reward": one.reward,
            "components": ", ".join(f"{name} {value}" for name, value in (one.components or {}).items()),
            "status": one.status, "advantage": one.advantage, "finish reason": one.finish_reason,
            "weight version": one.versions,
        }
        for one in found.samples
    ]  # fmt: skip


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def artifact_key(run: str, name: str) -> str:
    """A key that Prefect accepts: lowercase letters, digits and dashes."""
    return f"ratchet-{re.sub('[^a-z0-9]+', '-', run).strip('-')}-{name}"


def iteration_table(history: Sequence[IterationRecord], root: str, run: str) -> list[dict[str, Any]]:
    return [
        {
            "iteration": record.iteration,
            **{_TITLES.get(name, name): rounded(vars(record)[name]) for name in _FIGURES},
            **{f"{stage} s": round(seconds, 3) for stage, seconds in record.stage_seconds.items()},
            "start s": round(record.start_seconds, 3) or None,
            "without reward": sum(record.unscored.values()) or None,
            "manifests": shown_text(f"{root}/{layout.iteration_folder(run, record.iteration)}"),
        }
        for record in history
    ]


def viewer_text(viewer: str, run: str, root: str, history: Sequence[IterationRecord]) -> str:
    """Markdown with links to the pages of a run and its iterations, the newest first, and the paths of manifests."""
    place = f"{viewer}/run/{quote(run)}"
    rows = [
        f"| [iteration {one.iteration}]({place}/{one.iteration}) | "
        f"`{shown_text(f'{root}/{layout.iteration_folder(run, one.iteration)}')}` |"
        for one in reversed(history)
    ]
    once = "The links work after this browser has opened the whole address that `ratchet view` prints, with its token."
    head = ["| page | manifests |", "|---|---|"]
    return "\n".join([f"## [Run {run} in the viewer]({place})", "", once, "", *head, *rows])


def away_text(run: str, root: str, since: datetime, until: datetime, window: Sequence[IterationRecord]) -> str:
    """Markdown about a time without a server: what the manifests say was done in it."""
    rows = [
        f"| {record.iteration} | {', '.join(stage for stage in Stage if stage in record.done)} | "
        f"{figure(record.reward)} | {record.seconds:.1f} |"
        for record in window
    ]
    title = f"## The Prefect server was away from {since:%Y-%m-%d %H:%M:%S} to {until:%H:%M:%S} UTC"
    missing = "Task runs and subflow runs of that time may be missing here, or look as if they were still running"
    complete = f"the manifests in `{shown_text(root)}/{run}` are complete, and this is what they say"
    head = ["| iteration | stages that are done | mean reward | seconds |", "|---|---|---|---|"]
    return "\n".join([title, "", f"The work went on. {missing}: {complete}.", "", *head, *rows])


def summary(status: RunStatus) -> str:
    rows = [
        ("iterations", str(status.iterations)),
        *((f"{name}{remark}", _change(change)) for name, change, remark in figures_of(status.changes)),
        ("seconds per iteration (median)", figure(status.seconds_per_iteration)),
        ("stored in", f"`{status.root}/{status.run}`"),
        ("plot", f"`{status.report}`"),
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    warnings = [line for text in status.warnings for line in ("", f"**Warning:** {text}")]
    return "\n".join([f"## Run {status.run}", "", "| | |", "|---|---|", *lines, *warnings])


def _change(change: Change) -> str:
    since = f" since iteration {change.since}" if change.apart else ""
    return f"{figure(change.first)} -> {figure(change.last)}{since}"


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
    keeps the lease on the deployment's concurrency limit."""
    state = client.read_flow_run(flow_run).state
    if state is not None and state.is_running():
        client.set_flow_run_state(flow_run, Running(message=message))
