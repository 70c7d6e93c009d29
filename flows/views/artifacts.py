"""Artifacts of a Prefect flow run: a table of iterations, a summary and the curves."""

import contextvars
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote
from uuid import UUID

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.context import FlowRunContext

from flows.views.curves import data_uri
from flows.views.history import IterationRecord
from flows.views.output import figure, rounded
from flows.views.progress import figures_of
from flows.views.samples import Samples
from flows.views.status import Change, RunStatus
from storage import layout
from tasks.config.credentials import shown_text
from tasks.stages.names import Stage

WINDOW = 100  # iterations in a table: the last ones. All of them are in the run's metrics file.

_FIGURES = ("reward", "held_out_reward", "pass_rate", "kl", "entropy", "grad_norm", "tokens_per_second", "seconds")
_LONGEST = 2000  # characters of a text in a table
_TITLES = {"held_out_reward": "held-out reward", "pass_rate": "held-out pass rate", "kl": "KL before||after"}


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
