"""`ratchet maintain`: what deployment `maintain` does, from a shell."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl
from flows.cli.site import DEFAULT_FOLDER, Folder
from flows.maintenance import Maintenance, Upkeep, maintain_root
from flows.views.output import Output
from storage.backends.root import open_root
from storage.errors import StageFailed


class Maintained(BaseModel, frozen=True, extra="forbid"):
    """Result of `ratchet maintain`."""

    maintenance: Maintenance
    flow_runs: str | None
    """Result for old flow runs of the site; None if that was not asked for."""


def maintain_command(
    *runs: str,
    gc: Annotated[bool, Parameter(help="Delete what nothing needs; beside the work, what it cannot use.")] = True,
    compact: Annotated[bool, Parameter(help="Write new samples to the archive.")] = True,
    verify: Annotated[bool, Parameter(help="Read everything and compare it with its digests.")] = True,
    keep_days: Annotated[
        float | None,
        Parameter(help="Also delete flow runs of the site that ended that many days ago.", validator=Number(gt=0)),
    ] = None,
    root: RootUrl = DEFAULT_ROOT,
    folder: Folder = DEFAULT_FOLDER,
    json: Json = False,
) -> int:
    """Look after all runs of a root: gc, archive, verification. Safe while runs are driven. Exit code 1 on a problem.

    Parameters
    ----------
    runs
        Only these runs.
    """
    with Output(json=json) as output:
        done = maintain_root(open_root(root), Upkeep(gc=gc, compact=compact, verify=verify), runs, output.say)
        forgotten = None if keep_days is None else _forget(folder, keep_days)
        troubled = sum(bool(one.problems) for one in done.runs)
        lines = [f"{len(done.runs)} runs in {done.root}, {troubled or 'none'} of them with problems"]
        output.result(Maintained(maintenance=done, flow_runs=forgotten), [*lines, *([forgotten] if forgotten else [])])
    return 0 if done.healthy else StageFailed.exit_code


def _forget(folder: Path, keep_days: float) -> str:
    from flows.deployments.stored import forget  # imports Prefect
    from flows.site.processes import SiteFolder
    from flows.site.up import connected

    place = SiteFolder.at(folder)
    record = place.record()
    if record is None:
        return "old flow runs were not deleted: there is no site (`ratchet up`)"
    with connected(place, record):
        return forget(keep_days)
