"""Deployment `maintain`: gc, archives and verification of all runs of a root, and the deletion of old flow runs."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import httpx
from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from pydantic import Field

from flows.deployments.attempt import Asked, attempt
from flows.maintenance import Maintenance, Upkeep, maintain_root
from flows.server.history import TAG, forget_flow_runs
from flows.views.artifacts import artifact_key
from storage.backends.root import open_root
from tasks.config.credentials import shown_text

Days = Annotated[float, Field(gt=0)]


def named() -> str:
    """Name of a flow run in the UI."""
    return f"maintain {shown_text(flow_run.get_parameters()['root'])}"


@flow(name="maintain", flow_run_name=named, persist_result=False, validate_parameters=True)
def maintain(
    root: str,
    runs: list[str] = [],  # noqa: B006 - never changed; Prefect shows a default in its form
    gc: bool = True,
    compact: bool = True,
    verify: bool = True,
    keep_days: Days | None = 30.0,
) -> State[Any]:
    """Look after all runs of a storage root. Safe at any time, also while runs are driven, and twice at once.

    A run with a problem does not stop the others; the flow run is then red and names each problem.

    Args:
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        runs: Only these runs. By default all runs of the root.
        gc: Delete what crashes left behind, also of train states that retention has retired. Beside a process that
            drives a run, only what that process cannot use is deleted.
        compact: Write the samples of new iterations to the run's archive (Parquet), in chunks of 100 iterations.
        verify: Read everything that is stored and compare it with its digests. This takes as long as reading does.
        keep_days: Delete flow runs of this site that ended longer ago than this many days from Prefect's database, with
            their task runs and logs. Runs lose nothing by it. Empty keeps all.
    """
    logger = get_run_logger()
    upkeep = Upkeep(gc=gc, compact=compact, verify=verify)
    chosen = [name for name, wanted in upkeep.model_dump().items() if wanted] or ["no upkeep"]

    def work() -> State[Any]:
        done = maintain_root(open_root(root), upkeep, runs, lambda line: logger.info("%s", line))
        create_table_artifact(
            key=artifact_key(shown_text(root).lower(), "maintenance"),
            table=rows_of(done),
            description=f"Upkeep of {shown_text(root)}",
        )
        forgotten = forget(keep_days)
        problems = [f"run {one.run}: {text}" for one in done.runs for text in one.problems]
        if problems:
            return Failed(message="\n\n".join([f"{len(problems)} problems in {shown_text(root)}", *problems]))
        return Completed(message=f"{len(done.runs)} runs are in order; {forgotten}")

    will = f"{', '.join(chosen)} of {', '.join(runs) or 'all runs'}"
    return attempt(Asked(", ".join(runs) or "*", root, will, "looks after all of them again"), work)


def rows_of(done: Maintenance) -> list[dict[str, Any]]:
    """One row per run."""
    return [
        {
            "run": one.run,
            "driven": one.driven,
            "objects deleted": one.removed,
            "MiB deleted": round(one.removed_bytes / 2**20, 1),
            "samples archived": one.archived,
            "MiB verified": round(one.verified_bytes / 2**20, 1),
            "problems": "; ".join(one.problems) or "none",
        }
        for one in done.runs
    ]


def forget(keep_days: float | None) -> str:
    """Delete old flow runs; says what was done, or why it was not."""
    if keep_days is None:
        return "all flow runs are kept"
    try:
        with get_client(sync_client=True) as client:
            count = forget_flow_runs(client, TAG, datetime.now(UTC) - timedelta(days=keep_days))
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        return f"old flow runs were not deleted ({error}); the next maintenance does it"
    return f"{count} old flow runs were deleted"
