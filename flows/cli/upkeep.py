"""Commands that end, remove and look after runs: no vLLM or torch is imported, Prefect and Ray only where needed."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from flows.cli.options import Common, RunId, flag
from flows.cli.signals import LIMIT_SECONDS
from flows.cli.site import DEFAULT_FOLDER, Folder
from flows.maintenance import Maintenance, Upkeep, maintain_root
from flows.views.output import Output, count, size
from storage.errors import InputError, StageFailed
from storage.ownership.lease import check_free, end_holder, hold
from storage.upkeep.removal import Removed, forget, remove, what_is_there
from tasks.config.environment import Settings

_WAIT_S = LIMIT_SECONDS + 15.0  # more than a command takes to end


class Stopped(BaseModel, frozen=True, extra="forbid"):
    run: str
    process: int | None  # id of the process that drove the run; None if none did
    ended: bool  # True if no process of this machine drives the run now
    released: int | None  # processes that were ended on the cluster; None without a cluster


class Maintained(BaseModel, frozen=True, extra="forbid"):
    maintenance: Maintenance
    flow_runs: str | None  # result for old flow runs of the site; None if that was not asked for


def rm_command(run: RunId, *, yes: Annotated[bool, flag("Do not ask.")] = False, common: Common = Common()) -> int:
    """Remove a run and everything it has stored. Repeated after a crash, it finishes.

    A run that is driven is not removed. Forks of it have parts of their own, and stay as they are."""
    store = common.store
    there = what_is_there(store, run)
    check_free(store, run)
    with Output(json=common.json) as output:
        if not yes and not _confirmed(output, there):
            output.say("nothing was removed")
            return StageFailed.exit_code
        with hold(store, run, "ratchet rm") as lease:
            removed = remove(store, run, lease)
        forget(store, run)
        output.result(removed, [f"run {run}: {count(removed.objects, 'object')} removed, {size(removed.bytes)} freed"])
    return 0


def _confirmed(output: Output, there: Removed) -> bool:
    if not sys.stdin.isatty():
        raise InputError(
            f"ratchet rm {there.run} asks before it removes anything, but not in a pipe or a job: give --yes"
        )
    output.say(f"remove {count(there.objects, 'object')} of run {there.run}, which frees {size(there.bytes)}? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def stop_command(run: RunId, *, common: Common = Common()) -> int:
    """End the process of this machine that drives a run, as Ctrl-C would, and release what the run holds on a cluster.

    Nothing that is committed is lost. Exit code 1 if the process does not end in time."""
    store = common.of_run(run)
    with Output(json=common.json) as output:
        entry, ended = end_holder(store, run, _WAIT_S)
        released = _release(run, store.url) if ended and not Settings.from_environment().local else None
        process = None if entry is None else entry.owner.process
        stopped = Stopped(run=run, process=process, ended=ended, released=released)
        output.result(stopped, _stopped_lines(stopped))
    return 0 if ended else StageFailed.exit_code


def _release(run: str, root: str) -> int:
    from flows.run import release_workers  # imports Prefect and Ray

    return release_workers(run, root)


def _stopped_lines(stopped: Stopped) -> list[str]:
    if not stopped.ended:
        fact = f"process {stopped.process}, which drives run {stopped.run}, has not ended within {_WAIT_S:g} s"
        return [f"{fact}: `kill -9 {stopped.process}` ends it, and nothing that is committed is lost"]
    did = "no process drives it" if stopped.process is None else f"process {stopped.process} has ended"
    released = [] if stopped.released is None else [f"{stopped.released} processes on the cluster were ended"]
    return [f"run {stopped.run}: {did}", *released]


def maintain_command(
    *runs: Annotated[str, Parameter(help="Only these runs.")],
    gc: Annotated[
        bool, Parameter(help="Delete what nothing needs; of a run that is driven, only what its process cannot use.")
    ] = True,
    compact: Annotated[bool, Parameter(help="Write new samples to the archive.")] = True,
    verify: Annotated[bool, Parameter(help="Read everything and compare it with its digests.")] = True,
    keep_days: Annotated[
        float | None,
        Parameter(help="Also delete flow runs of the site that ended that many days ago.", validator=Number(gt=0)),
    ] = None,
    folder: Folder = DEFAULT_FOLDER,
    common: Common = Common(),
) -> int:
    """Look after all runs: gc, archive, verification. Safe while runs are driven. Exit code 1 if one has a problem."""
    with Output(json=common.json) as output:
        done = maintain_root(common.store, Upkeep(gc=gc, compact=compact, verify=verify), runs, output.say)
        forgotten = None if keep_days is None else _forget(folder, keep_days)
        troubled = sum(bool(one.problems) for one in done.runs)
        lines = [f"{count(len(done.runs), 'run')} in {done.root}, {troubled or 'none'} with problems"]
        output.result(Maintained(maintenance=done, flow_runs=forgotten), [*lines, *([forgotten] if forgotten else [])])
    return 0 if done.healthy else StageFailed.exit_code


def _forget(folder: Path, keep_days: float) -> str:
    from flows.deployments.stored import forget  # imports Prefect
    from flows.site.processes import SiteFolder
    from flows.site.up import connected

    place = SiteFolder.at(folder)
    if (record := place.record()) is None:
        return "old flow runs were not deleted: there is no site (`ratchet up`)"
    with connected(place, record):
        return forget(keep_days)
