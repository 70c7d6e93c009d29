"""Garbage: what may go, and taking it away. Nothing that a kept manifest of any run names is ever removed.

Retention gives up train states first by a record, then looks again at what everything names, and only then removes. A
fork does it the other way round: it publishes manifests that name the parts, then looks for such a record. So of a fork
and a retention at the same moment at least one sees the other.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from pydantic import BaseModel, ConfigDict, computed_field

from storage import layout, records
from storage.backends.root import Root
from storage.ids import Workflow
from storage.manifest import Manifest, revisions
from storage.upkeep.catalog import Contents, Retired, contents, named_parts

_GIVEN_UP = "of a train state that retention gives up"

ORPHAN_AGE = timedelta(days=1)
"""A younger object that nothing names may belong to a stage in work."""


class Retention(BaseModel):
    """Which train states are kept. Those of iteration 0, of the newest weights served, and newer ones always are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    newest: int | None = None
    """Keep this many of the newest; all if it is not given."""
    every: int | None = None
    """Beyond those, keep the states of iterations that this number divides."""

    def keeps(self, iteration: int, newest: int) -> bool:
        """Whether the state of `iteration` stays when `newest` is the newest."""
        if iteration == 0 or self.newest is None or iteration > newest - max(self.newest, 1):
            return True
        return self.every is not None and iteration % self.every == 0

    def __str__(self) -> str:
        every = f" and those of every {self.every}th iteration" if self.every else ""
        return "all states are kept" if self.newest is None else f"the newest {self.newest}{every} are kept"


KEEP_ALL = Retention()


class Garbage(BaseModel):
    """One object that may go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    """Key below the storage root."""
    bytes: int
    """Its size."""
    reason: str
    """Why nobody needs it."""


class Collection(BaseModel):
    """What gc found, and whether it removed it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    applied: bool
    """False: nothing was touched."""
    garbage: tuple[Garbage, ...]

    @computed_field
    @property
    def bytes(self) -> int:
        """Size of it all."""
        return sum(one.bytes for one in self.garbage)


def collect(
    root: Root,
    workflow: Workflow,
    run: str,
    retention: Retention = KEEP_ALL,
    *,
    apply: bool = False,
    now: datetime | None = None,
) -> Collection:
    """Find what may go of a run's own objects; with `apply`, remove it. Hold the run's lease to apply.

    Raises:
        DigestMismatch, SchemaMismatch: a record of some run cannot be read, so what it names is not known.
    """
    moment = now or datetime.now(UTC)
    stored = contents(root, run)
    given_up = {
        key: manifest
        for key, manifest in _states(stored, workflow)
        if not _keeps(stored, workflow, retention, manifest)
    }
    if apply:
        for key, manifest in given_up.items():
            _retire(root, key, manifest, retention, moment)
    garbage = [*_parts(root, stored, given_up, moment), *_records(root, stored, moment), *_leftovers(root, run, moment)]
    if apply:
        for one in garbage:
            root.remove(one.key)
    return Collection(run=run, applied=apply, garbage=tuple(garbage))


def give_up(root: Root, workflow: Workflow, run: str, retention: Retention, served: int) -> Collection:
    """Remove the one train state that newly served weights have pushed out of retention, if there is one.

    What `collect` does for all states, without reading the whole root: one look-up for each other run, because a fork
    names the parts of a state in its own manifest of the same iteration. Hold the run's lease.

    Args:
        served: iteration of the weights that were served last.
    """
    iteration = served - (retention.newest or 0)
    garbage: list[Garbage] = []
    if iteration > 0 and not retention.keeps(iteration, served):
        stage = workflow.holds_state
        manifests = list(revisions(root, run, iteration, stage))
        for manifest in manifests:
            key = layout.manifest_key(run, iteration, stage, manifest.revision)
            _retire(root, key, manifest, retention, datetime.now(UTC))
        others = [other for other in root.folders() if other != run]
        named = {
            part.key
            for other in others
            for one in revisions(root, other, iteration, workflow.holds_state)
            for part in one.parts
        }
        own = {part.key: part for one in manifests for part in one.parts if layout.is_part_of(part.key, run)}
        garbage = [
            Garbage(key=key, bytes=part.bytes, reason=_GIVEN_UP) for key, part in own.items() if key not in named
        ]
        for one in garbage:
            root.remove(one.key)
    return Collection(run=run, applied=True, garbage=tuple(garbage))


def _states(stored: Contents, workflow: Workflow) -> Iterator[tuple[str, Manifest]]:
    return ((key, manifest) for key, manifest in stored.kept.items() if manifest.stage == workflow.holds_state)


def _keeps(stored: Contents, workflow: Workflow, retention: Retention, state: Manifest) -> bool:
    # a state is not the newest before its weights are served: until then the one before may be needed again
    served = (manifest.iteration for manifest in stored.kept.values() if manifest.stage == workflow.ends_iteration)
    return retention.keeps(state.iteration, max(served, default=0))


def _retire(root: Root, key: str, manifest: Manifest, retention: Retention, moment: datetime) -> None:
    keys = tuple(part.key for part in manifest.parts)
    record = Retired(manifest=manifest.digest, keys=keys, time=moment, rule=f"retention: {retention}")
    records.publish(root, layout.retired_key(key), record)


def _parts(root: Root, stored: Contents, given_up: dict[str, Manifest], moment: datetime) -> Iterator[Garbage]:
    retired = {part.key for key, one in stored.manifests.items() if key in stored.retired for part in one.parts}
    retired |= {part.key for manifest in given_up.values() for part in manifest.parts}
    kept = {key: manifest for key, manifest in stored.kept.items() if key not in given_up}
    named = {part.key for manifest in kept.values() for part in manifest.parts}
    named |= {part.key for part in stored.unfinished.values()}
    # after the records of retirement are written: a fork that was made meanwhile is seen here, or it sees them
    named |= named_parts(root, [other for other in root.folders() if other != stored.run])
    for one in root.stored(layout.part_folder(stored.run)):
        if one.key in named or layout.is_temporary(one.key):
            continue
        if one.key in retired:
            yield Garbage(key=one.key, bytes=one.bytes, reason=_GIVEN_UP)
        elif one.modified < moment - ORPHAN_AGE:
            yield Garbage(key=one.key, bytes=one.bytes, reason="no manifest names it")


def _records(root: Root, stored: Contents, moment: datetime) -> Iterator[Garbage]:
    entries = [one for one in root.stored(layout.lease_folder(stored.run)) if layout.is_lease(one.key)]
    for one in entries[:-1]:  # the newest entry says who drives the run, or that nobody does
        if one.modified < moment - ORPHAN_AGE:
            yield Garbage(key=one.key, bytes=one.bytes, reason="a lease entry that others followed")
    done = set(stored.pieces) - set(stored.unfinished)
    for one in root.stored(layout.manifest_folder(stored.run)):
        if one.modified >= moment - ORPHAN_AGE:
            continue
        if one.key in done:
            yield Garbage(key=one.key, bytes=one.bytes, reason="a piece of a stage that is committed")
        elif layout.is_attempt(one.key) and layout.stage_of(one.key) in stored.manifests:
            yield Garbage(key=one.key, bytes=one.bytes, reason="an attempt at a stage that is committed")


def _leftovers(root: Root, run: str, moment: datetime) -> Iterator[Garbage]:
    for one in root.stored(run):
        if layout.is_temporary(one.key) and one.modified < moment - ORPHAN_AGE:
            yield Garbage(key=one.key, bytes=one.bytes, reason="a write that a crash ended")
