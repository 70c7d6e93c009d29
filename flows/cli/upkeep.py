"""Commands that end and remove runs: no Prefect, vLLM or torch is imported, and Ray only where there is a cluster."""

import sys
from typing import Annotated

from cyclopts import Parameter
from pydantic import BaseModel

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl
from flows.cli.printing import size
from flows.cli.signals import LIMIT_SECONDS
from flows.views.output import Output
from storage.backends.root import open_root
from storage.errors import InputError, StageFailed
from storage.ids import check_run_name
from storage.ownership.lease import check_free, hold
from storage.ownership.stopping import end_holder
from storage.upkeep.catalog import require_run
from storage.upkeep.removal import Removed, forget, remove, what_is_there
from tasks.config.environment import Settings

_MORE_SECONDS = 15.0  # beyond what a command takes at most to end


class Stopped(BaseModel, frozen=True, extra="forbid"):
    """Result of `ratchet stop`."""

    run: str
    process: int | None
    """Id of the process that drove the run; None if none did."""
    ended: bool
    """True if no process of this machine drives the run now."""
    released: int | None
    """Processes that were ended on the cluster; None without a cluster."""


def rm_command(
    run: str,
    *,
    yes: Annotated[bool, Parameter(help="Do not ask.", negative=())] = False,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Remove a run and everything it has stored. Repeated after a crash, it finishes.

    A run that is driven is not removed. Forks of it have parts of their own, and stay as they are.

    Parameters
    ----------
    run
        Id of the run.
    """
    store = open_root(root)
    there = what_is_there(store, run)
    check_free(store, run)
    with Output(json=json) as output:
        if not yes and not _confirmed(output, there):
            output.say("nothing was removed")
            return StageFailed.exit_code
        with hold(store, run, "ratchet rm") as lease:
            removed = remove(store, run, lease)
        forget(store, run)
        output.result(removed, [f"run {run}: {removed.objects} objects ({size(removed.bytes)}) removed"])
    return 0


def stop_command(run: str, *, root: RootUrl = DEFAULT_ROOT, json: Json = False) -> int:
    """End the process of this machine that drives a run, as Ctrl-C would, and release what the run holds on a cluster.

    Nothing that is committed is lost. Exit code 1 if the process does not end in time.

    Parameters
    ----------
    run
        Id of the run.
    """
    store = open_root(root)
    require_run(store, check_run_name(run))
    with Output(json=json) as output:
        entry, ended = end_holder(store, run, LIMIT_SECONDS + _MORE_SECONDS)
        released = _release(run) if ended and not Settings.from_environment().local else None
        process = None if entry is None else entry.owner.process
        stopped = Stopped(run=run, process=process, ended=ended, released=released)
        output.result(stopped, _stopped_lines(stopped))
    return 0 if ended else StageFailed.exit_code


def _release(run: str) -> int:
    from flows.run import release_workers  # imports Prefect and Ray

    return release_workers(run)


def _confirmed(output: Output, there: Removed) -> bool:
    if not sys.stdin.isatty():
        raise InputError(f"ratchet rm {there.run} asks before it removes anything, and this is no terminal: give --yes")
    output.say(f"remove {there.objects} objects ({size(there.bytes)}) of run {there.run}? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _stopped_lines(stopped: Stopped) -> list[str]:
    if not stopped.ended:
        waited = LIMIT_SECONDS + _MORE_SECONDS
        return [f"process {stopped.process}, which drives run {stopped.run}, has not ended within {waited:g} s"]
    did = "no process drives it" if stopped.process is None else f"process {stopped.process} has ended"
    released = [] if stopped.released is None else [f"{stopped.released} processes on the cluster were ended"]
    return [f"run {stopped.run}: {did}", *released]
