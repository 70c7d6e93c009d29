"""Stages that were committed and are lost, although later work was made from them: a hole in a run's past.

It is found by the names of the manifests alone, so a start may look however long the run is."""

import shlex
from collections.abc import Collection, Iterator, Sequence

from storage import layout
from storage.backends.root import Root
from storage.errors import WrongRecord
from storage.ids import Workflow
from storage.manifest import load
from storage.upkeep.catalog import Names

_Place = tuple[int, str]
_LONGEST = 58  # characters of a run's name to which "-fork" can be added


def check_whole(
    root: Root,
    workflow: Workflow,
    run: str,
    recorded: Names,
    ahead: int = 0,
    last: int | None = None,
    given: Sequence[str] = (),
) -> None:
    """Refuse to go on from iteration `last`, by default the newest, after a hole. Other arguments, and errors, are
    those of `hole`; also raises WrongRecord: there is one."""
    found = hole(root, workflow, run, recorded, ahead, given)
    if found is not None and (last is None or found[0] <= last):
        raise WrongRecord(found[1])


def hole(
    root: Root, workflow: Workflow, run: str, recorded: Names, ahead: int = 0, given: Sequence[str] = ()
) -> tuple[int, str] | None:
    """The iteration of the first hole of a run, and what it is and its repair in words; None if there is none. Weights
    of up to `ahead` updates before sample for the run, and the repair has the settings `given`, `section.key=value`.
    Another process may commit meanwhile. Raises DigestMismatch or SchemaMismatch: a manifest that had to be read is
    damaged."""
    for at, stage in _lost(root, workflow, recorded):
        key = layout.manifest_key(run, at, stage, recorded.revisions.of(at, stage))
        if not root.exists(key):  # it may have been committed since its folder was listed
            fact = f"{root.url}/{key} is lost: run {run!r} has stages that were made from {stage} of iteration {at}"
            instead = _instead(root, workflow, run, recorded, at, ahead, given)
            return at, f"{fact}. Restore it from a copy of the root, or {instead}"
    return None


def _lost(root: Root, workflow: Workflow, recorded: Names) -> Iterator[_Place]:
    """The stages that must be there and are not. Some runs do without scores, of neighbouring iterations: so at the
    ends of a stretch that has none, and where they were begun, the training says whether it was made from them. Within
    a stretch, scores that are lost with the records of their attempts are not missed."""
    newest = recorded.newest
    missing = list(_missing(workflow, newest))
    without = {at for at, stage in missing if stage in workflow.optional}
    begun = {layout.place_of(key) for key in recorded.attempts}
    for at, stage in missing:
        if stage not in workflow.optional:
            yield at, stage
        elif not {at - 1, at + 1} <= without or (at, stage) in begun:
            training = newest.get((max(at, 1), workflow.holds_state))
            if training is not None and "reward" in load(root, training).inputs:
                yield at, stage


def _missing(workflow: Workflow, there: Collection[_Place]) -> Iterator[_Place]:
    """Stages that are not there: of an iteration before the newest trained one any, but those that nothing is made
    from; of others those that come before one that is there."""
    trained = max((at for at, stage in there if stage == workflow.holds_state), default=0)
    for at in range(max((at for at, _ in there), default=-1) + 1):
        stages = workflow.stages_of(at)
        if at >= trained:
            done = [number for number, stage in enumerate(stages) if (at, stage) in there]
            stages = stages[: max(done, default=0)]
        for stage in stages:
            if (at, stage) not in there and workflow.behind.get(stage) != ():
                yield at, stage


def _instead(
    root: Root, workflow: Workflow, run: str, recorded: Names, lost: int, ahead: int, given: Sequence[str]
) -> str:
    stage, newest, kept = workflow.holds_state, recorded.newest, {*recorded.kept(workflow.holds_state)}

    def begins(at: int) -> bool:
        needed = range(max(0, at - ahead), at + 1)
        return kept.issuperset(needed) and all(load(root, newest[one, stage]).parts for one in needed)

    if workflow.ends_iteration == stage or (last := next(filter(begins, range(lost - 1, -1, -1)), None)) is None:
        return "begin a new run: none can be forked from this one before it"
    seen = recorded.revisions.seen_from
    more = [*(f"--set={one}" for one in given), *([] if seen is None else [f"--revision={seen}"])]
    again = ["ratchet", "fork", f"{run}@{last}", f"--run={run[:_LONGEST]}-fork", *more, f"--root={root.url}"]
    return f"go on from the last state before it: `{shlex.join(again)}`"
