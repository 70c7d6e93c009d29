"""Garbage: what may be deleted, and deleting it. Nothing that a kept manifest of the run names is ever deleted.

Retention retires train states by a record before it deletes them; a fork that finds a part gone looks for that record.
Parts of a run without `run.json` are not garbage: a fork may be copying them, and a link is as old as its original."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import batched, groupby

from pydantic import BaseModel, computed_field

from storage import layout, records
from storage.backends.backend import Stored
from storage.backends.root import Root
from storage.errors import StorageError
from storage.ids import Workflow
from storage.manifest import Fence, find
from storage.revisions import FIRST, Revisions, read_revisions
from storage.upkeep.catalog import Contents, Names, Retired, Unreadable, names, survey

logger = logging.getLogger(__name__)

_RETIRED = "of a train state that retention retires"
_ORPHAN = "no manifest names it"
_BATCH = 16  # objects that are deleted between two looks at who drives the run

ORPHAN_AGE = timedelta(days=1)  # a younger object that nothing names may belong to a stage in progress


class Retention(BaseModel, frozen=True, extra="forbid"):
    """Train states that are kept, besides those of iteration 0, of the newest served weights, and newer ones. In the
    place of one that is not stored, the one that it is made again from is kept."""

    newest: int | None = None  # keep this many of the newest; by default all
    every: int | None = None  # also keep the states of iterations that this number divides

    def keeps(self, iteration: int, newest: int) -> bool:
        if iteration == 0 or self.newest is None or iteration > newest - max(self.newest, 1):
            return True
        return self.every is not None and iteration % self.every == 0

    def __str__(self) -> str:
        every = f" and those of every {self.every}th iteration" if self.every else ""
        return "all states are kept" if self.newest is None else f"the newest {self.newest}{every} are kept"


KEEP_ALL = Retention()


class Garbage(BaseModel, frozen=True, extra="forbid"):
    key: str  # key below the storage root
    bytes: int  # what its removal frees; 0 if another run has it too, by a hard link, or the store does not tell
    reason: str  # reason why nothing needs it
    upload: str | None = None  # id of the upload, if it is one that was never finished


class Collection(BaseModel, frozen=True, extra="forbid"):
    run: str
    applied: bool  # false: nothing was touched
    garbage: tuple[Garbage, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    """Records that may name parts and cannot be read. While there are any, no part counts as garbage."""

    @computed_field
    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.garbage)


def collect(
    root: Root,
    workflow: Workflow,
    run: str,
    retention: Retention = KEEP_ALL,
    *,
    apply: bool = False,
    now: datetime | None = None,
    fence: Fence | None = None,
) -> Collection:
    """Find what may be deleted of a run's own objects; with `apply`, delete it. Hold the run's lease to apply. `fence`
    is the lease, which is checked between deletions. Raises LeaseLost if it is lost; then the rest is not deleted."""
    cleaning = _Cleaning(root, run, now or datetime.now(UTC), apply, fence)
    recorded = names(root, run)
    stored, unreadable = survey(root, run, recorded)
    there, old = root.stored(run), cleaning.moment - ORPHAN_AGE
    garbage = [*_records([one for one in there if one.modified < old], there, stored), *_uploaded(root, run, old)]
    if not unreadable and root.exists(layout.run_config_key(run)):
        parts = [one for one in there if one.key.startswith(f"{layout.part_folder(run)}/")]
        pushed_out = _pushed_out(root, run, recorded, workflow, retention)
        garbage = [*cleaning.parts(parts, stored, pushed_out, retention), *garbage]
    return Collection(run=run, applied=apply, garbage=tuple(cleaning.deleted(garbage)), unreadable=tuple(unreadable))


def catch_up(
    root: Root,
    workflow: Workflow,
    run: str,
    retention: Retention,
    *,
    fence: Fence | None = None,
    revisions: Revisions | None = None,
) -> Collection:
    """Delete the train states that earlier processes left, or that an earlier configuration kept. Like `collect`, but
    only for the train states of committed stages. It reads the manifests of those that have parts and uses only the
    names of all other records, so a run can wait for it. What an uncommitted stage has left is kept for the next
    attempt. Raises as `collect`. `revisions` are those of the run; by default they are read."""
    cleaning = _Cleaning(root, run, fence=fence)
    recorded = names(root, run, revisions=revisions)
    pushed_out = _pushed_out(root, run, recorded, workflow, retention)
    committed = {layout.place_of(key) for key in recorded.of_stage(workflow.holds_state)}
    retired = {layout.place_of(key) for key in (*recorded.retired, *pushed_out)}
    old = cleaning.moment - ORPHAN_AGE
    parts = [
        one
        for one in root.stored(layout.part_folder(run))
        if (place := layout.place_of(one.key)) in committed and (one.modified < old or place in retired)
    ]
    places = {layout.place_of(one.key) for one in parts}
    near = recorded.only(lambda key: key in pushed_out or layout.place_of(key) in places)
    return cleaning.states(parts, near, pushed_out, retention)


def give_up(
    root: Root,
    workflow: Workflow,
    run: str,
    retention: Retention,
    served: int,
    *,
    fence: Fence | None = None,
    revisions: Revisions | None = None,
) -> Collection:
    """Delete the train states of the one iteration that newly served weights push out of retention. Does for one
    iteration what `catch_up` does for all, with some ten requests, however many iterations and reruns there are.
    Arguments and errors are the same. `served` is the iteration of the newest served weights."""
    stage, oldest = workflow.holds_state, served - (retention.newest or served) + 1
    seen = read_revisions(root, run) if revisions is None else revisions
    iteration = 0
    if oldest > 1 and _stored(root, run, oldest, stage, seen) == oldest:  # else the one before it is still needed
        found = _stored(root, run, oldest - 1, stage, seen)
        iteration = oldest - 1 if found is None else found  # one that cannot be read is reported below
    if retention.keeps(iteration, served):
        return Collection(run=run, applied=True)
    cleaning = _Cleaning(root, run, fence=fence)
    recorded = names(root, run, iteration, seen).only(lambda key: layout.place_of(key) == (iteration, stage))
    needed = _needed(root, workflow, run, iteration, served, oldest, seen)
    parts = root.stored(layout.stage_parts(run, iteration, stage))
    return cleaning.states(parts, recorded, set(recorded.manifests) - recorded.retired - needed, retention)


@dataclass(frozen=True)
class _Cleaning:
    root: Root
    run: str
    moment: datetime = field(default_factory=lambda: datetime.now(UTC))
    apply: bool = True
    fence: Fence | None = None

    def states(self, parts: list[Stored], near: Names, pushed_out: set[str], retention: Retention) -> Collection:
        """Retire states and delete their parts; warn if it is not known which."""
        stored, unreadable = survey(self.root, self.run, near)
        garbage = [] if unreadable else self.parts(parts, stored, pushed_out, retention)
        for one in unreadable:
            logger.warning("no state of run %s is deleted: %s cannot be read: %s", self.run, one.key, one.reason)
        gone = tuple(self.deleted(garbage))
        return Collection(run=self.run, applied=True, garbage=gone, unreadable=tuple(unreadable))

    def parts(
        self, parts: Iterable[Stored], stored: Contents, pushed_out: set[str], retention: Retention
    ) -> list[Garbage]:
        """Retire states, then find the parts that nothing needs."""
        for some in batched(sorted(pushed_out) if self.apply else (), _BATCH):
            self._check()
            for key in some:
                manifest, rule = stored.manifests[key], f"retention: {retention}"
                record = Retired(manifest=manifest.digest, keys=manifest.state_keys, time=self.moment, rule=rule)
                records.publish(self.root, layout.retired_key(key), record)
        return list(self._unnamed(parts, stored, pushed_out))

    def deleted(self, garbage: Iterable[Garbage]) -> Iterator[Garbage]:
        """Delete one after another and yield each; without `apply`, only yield them."""
        for some in batched(garbage, _BATCH):
            if not self.apply:
                yield from some
                continue
            self._check()
            orphaned = self._still_orphaned(one.key for one in some if one.reason == _ORPHAN)
            for one in some:
                if one.reason != _ORPHAN or one.key in orphaned:
                    drop(self.root, one)
                    yield one

    def _unnamed(self, parts: Iterable[Stored], stored: Contents, pushed_out: set[str]) -> Iterator[Garbage]:
        retired = {*stored.retired, *pushed_out}
        gone = {part.key for key, one in stored.manifests.items() if key in retired for part in one.parts}
        named = stored.parts(pushed_out)
        for one in parts:
            if one.key in named or layout.is_temporary(one.key) or layout.is_stray(one.key):
                continue
            if one.key in gone:
                yield Garbage(key=one.key, bytes=_freed(one), reason=_RETIRED)
            elif one.modified < self.moment - ORPHAN_AGE:
                yield Garbage(key=one.key, bytes=_freed(one), reason=_ORPHAN)

    def _still_orphaned(self, keys: Iterable[str]) -> set[str]:
        """The keys that no manifest or piece of their stage names by now, and that no stage has touched."""
        orphaned: set[str] = set()
        for place, some in groupby(sorted(keys), layout.place_of):
            near = Names() if place is None else names(self.root, self.run, place[0], FIRST)
            at_place = near.only(lambda key, place=place: layout.place_of(key) == place)
            stored, unreadable = survey(self.root, self.run, at_place)
            if not unreadable:
                orphaned |= {key for key in some if key not in stored.parts() and is_old(self.root, key, self.moment)}
        return orphaned

    def _check(self) -> None:
        if self.fence is not None:
            self.fence.check()


def is_old(root: Root, key: str, moment: datetime) -> bool:
    """True if an object is there, and older than what a stage in progress may have made."""
    found = root.info(key)
    return found is not None and found.modified < moment - ORPHAN_AGE


def drop(root: Root, one: Garbage) -> None:
    if one.upload is None:
        root.remove(one.key)
    else:
        root.abort_upload(one.key, one.upload)


def _pushed_out(root: Root, run: str, recorded: Names, workflow: Workflow, retention: Retention) -> set[str]:
    """Manifests of states to be retired: those that no revision keeps. Each keeps what it is continued from."""
    stage, ends = workflow.holds_state, workflow.ends_iteration
    seen = [recorded.revisions.seen(number) for number in recorded.revisions.numbers]
    synced = [(layout.revision_of(key), at) for key, at in recorded.of_stage(ends).items()]
    # a state counts as the newest once its weights are served: until then the one before may be needed again
    served = [max((at for mine, at in synced if one.of(at, ends) == mine), default=0) for one in seen]
    bases: list[int | None] = [0 for _ in seen]
    if (count := retention.newest) is not None:
        pairs = zip(seen, served, strict=True)
        bases = [_stored(root, run, newest - count + 1, stage, one) for one, newest in pairs]

    def kept(key: str, iteration: int) -> bool:
        mine = layout.revision_of(key)
        every = [of for of in zip(seen, served, bases, strict=True) if of[0].of(iteration, stage) == mine]
        return any(iteration >= (base or 0) or retention.keeps(iteration, newest) for _, newest, base in every)

    states = recorded.of_stage(stage).items()
    return {key for key, iteration in states if key not in recorded.retired and not kept(key, iteration)}


def _stored(root: Root, run: str, iteration: int, stage: str, seen: Revisions) -> int | None:
    """The newest iteration up to this one whose train state was stored: from it the state of this one is made again.
    None if a record on the way cannot be read."""
    try:
        while iteration > 0 and (one := find(root, run, iteration, stage, seen)) is not None and not one.parts:
            iteration -= 1
    except StorageError:
        return None
    return max(iteration, 0)


def _needed(
    root: Root, workflow: Workflow, run: str, iteration: int, served: int, oldest: int, every: Revisions
) -> set[str]:
    """Manifests of an iteration's states that a revision needs: one that has not served weights of `served` itself, or
    whose state of the iteration `oldest` is made again from there."""
    if not every.reruns:  # the only one has
        return set()
    ends, state = workflow.ends_iteration, workflow.holds_state
    there = set(names(root, run, served, every).manifests)

    def needs(one: Revisions) -> bool:
        if _key(run, served, ends, one) not in there:
            return True
        mine = one.of(oldest, state) != every.of(oldest, state)  # that of the head is stored
        return mine and ((first := _stored(root, run, oldest, state, one)) is None or first <= iteration)

    behind = filter(needs, map(every.seen, every.numbers))
    return {_key(run, iteration, state, one) for one in behind}


def _key(run: str, iteration: int, stage: str, seen: Revisions) -> str:
    return layout.manifest_key(run, iteration, stage, seen.of(iteration, stage))


def _records(old: Iterable[Stored], there: Iterable[Stored], stored: Contents) -> Iterator[Garbage]:
    """Of the old objects those that the records of a run supersede, or that were never finished."""
    last = max((number for one in there if (number := layout.lease_number(one.key))), default=0)
    done = set(stored.pieces) - set(stored.unfinished)
    for one in old:
        piece, committed = layout.piece_of_increment(one.key), layout.stage_of(one.key) in stored.manifests
        reasons = {
            # the newest entry says which process drives the run, if any
            "a lease entry that others followed": (layout.lease_number(one.key) or last) < last,
            "a piece of a stage that is committed": one.key in done,
            "an increment of responses that are stored": piece and (piece in stored.pieces or committed),
            "an attempt at a stage that is committed": layout.is_attempt(one.key) and committed,
            "a write that a crash ended": layout.is_temporary(one.key),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            yield Garbage(key=one.key, bytes=_freed(one), reason=reason)


def _freed(one: Stored) -> int:
    return 0 if one.shared else one.bytes


def _uploaded(root: Root, run: str, old: datetime) -> Iterator[Garbage]:
    for one in root.uploads(run):
        if one.started < old:
            yield Garbage(key=one.key, bytes=0, reason="an upload that a crash ended", upload=one.id)
