"""Runs that begin with the past of another, and settings under which that past does not go on."""

import shlex
from collections.abc import Sequence

from storage.backends.root import Root
from storage.errors import InputError
from storage.ids import check_run_name
from storage.manifest import find
from storage.revisions import read_revisions
from storage.upkeep.fork import Announce, Forked, fork
from tasks.config.credentials import is_secret
from tasks.config.run import RunConfig
from tasks.config.stored import ConfigRecord, forked_config
from tasks.stages.names import WORKFLOW, Stage
from tasks.stages.views import IN_FLIGHT


def make_fork(
    root: Root,
    parent: str,
    iteration: int,
    run: str,
    settings: Sequence[str] = (),
    revision: int | None = None,
    request: str | None = None,
    announce: Announce = lambda _: None,
) -> Forked:
    """Make run `run` from iterations 0 to `iteration` of `parent`, with settings replaced; `request` is the identity of
    the flow run that asked for it. Raises InputError: as `forked_config` and `check_followed`; else as `fork`."""
    config = forked_config(root, parent, check_run_name(run), settings, revision)
    check_followed(root, parent, iteration, config, settings, run, revision)
    record, older = ConfigRecord.of(config, request), config.rollout.ahead
    return fork(root, WORKFLOW, parent, iteration, run, record.digest, record, revision, announce, older)


def check_followed(
    root: Root, run: str, iteration: int, config: RunConfig, given: Sequence[str], new: str, revision: int | None = None
) -> None:
    """Raises InputError: the rollout of `iteration` has left responses open, which one with updates between would skip;
    with the command that makes run `new` with the settings `given` from before the first rollout."""
    revisions = read_revisions(root, run)
    before = find(root, run, iteration, Stage.ROLLOUT, revisions if revision is None else revisions.seen(revision))
    if config.rollout.updates == "in-flight" or before is None or IN_FLIGHT not in before.part_names:
        return
    groups = before.metrics["groups_in_flight"]
    said = [f"--set={one}" for one in given if not is_secret(one.partition("=")[0])]
    more = [] if revision is None else [f"--revision={revision}"]
    again = shlex.join(["ratchet", "fork", f"{run}@0", f"--run={new}", *said, *more, f"--root={root.url}"])
    raise InputError(
        f'rollout.updates = "{config.rollout.updates}" would skip prompts: the rollout of iteration {iteration} of run '
        f"{run!r} has left {groups:.0f} prompt groups in flight, with which only a rollout with "
        f'rollout.updates = "in-flight" goes on. Set it so, or fork the run before its first rollout:\n  {again}'
    )
