"""Contents of a root: runs, their manifests, and the parts that these name. For display and cleaning."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Literal

from pydantic import BaseModel

from storage import layout, records
from storage.backends.root import Root
from storage.errors import (
    DigestMismatch,
    InputError,
    NotCommitted,
    SchemaMismatch,
    StorageError,
    StorageUnavailable,
    WrongRecord,
)
from storage.ids import check_run_name, is_run_name
from storage.manifest import Manifest, Part, load
from storage.ownership.lease import describe, holder
from storage.parallel import each
from storage.revisions import FIRST, Revisions, read_revisions
from storage.unfinished import read_piece

_READERS = 8


class Unreadable(BaseModel, frozen=True, extra="forbid"):
    """A record that cannot be read, so what it names is not known."""

    run: str  # the run it belongs to
    key: str  # key below the storage root
    reason: str  # damaged, of another format, or the store's error


class Retired(BaseModel, frozen=True, extra="forbid"):
    """Record that retention has deleted the train state of one manifest, or is about to."""

    format_version: Literal[1] = 1  # version of this record's own format
    manifest: str  # digest of the manifest
    keys: tuple[str, ...]  # the parts of the state, which may be gone
    time: datetime  # time of the record (UTC)
    rule: str  # the reason, in words


class Removal(BaseModel, frozen=True, extra="forbid"):
    format_version: Literal[1] = 1  # version of this record's own format
    time: datetime  # time of its beginning (UTC)


@dataclass(frozen=True)
class Names:
    """A run's records, by name alone."""

    manifests: tuple[str, ...] = ()  # keys of all manifests, sorted
    retired: frozenset[str] = frozenset()  # those whose parts retention has deleted
    pieces: tuple[str, ...] = ()  # keys of the records of pieces
    attempts: tuple[str, ...] = ()  # keys of the records of attempts
    increments: tuple[str, ...] = ()  # keys of the records of increments
    revisions: Revisions = FIRST  # the revisions, seen from the one whose manifests are the newest

    def only(self, wanted: Callable[[str], bool]) -> "Names":
        kinds = ("manifests", "pieces", "attempts", "increments")
        kept = {name: tuple(filter(wanted, vars(self)[name])) for name in kinds}
        return replace(self, retired=frozenset(filter(wanted, self.retired)), **kept)

    def of_stage(self, stage: str) -> dict[str, int]:
        places = ((key, layout.place_of(key)) for key in self.manifests)
        return {key: place[0] for key, place in places if place is not None and place[1] == stage}

    def kept(self, stage: str) -> list[int]:
        """Iterations of which a stage's manifest counts and is not retired, sorted."""
        return sorted(at for (at, name), key in self.newest.items() if name == stage and key not in self.retired)

    @cached_property
    def newest(self) -> Mapping[tuple[int, str], str]:
        """Key of each stage's manifest that counts, by iteration and stage: that of the head, or of `seen_from`."""
        places = ((key, layout.place_of(key)) for key in self.manifests)
        of = self.revisions.of
        return {place: key for key, place in places if place is not None and layout.revision_of(key) == of(*place)}


@dataclass(frozen=True)
class Contents:
    run: str
    manifests: Mapping[str, Manifest]  # all revisions, by key, in the order of work
    retired: Mapping[str, Retired] = field(default_factory=dict)  # by the key of the manifest
    pieces: Mapping[str, Part] = field(default_factory=dict)  # by key, including those of committed stages
    revisions: Revisions = FIRST  # the revisions, seen from the one whose manifests are the newest

    @property
    def newest(self) -> list[Manifest]:
        """The manifest of each stage that counts, in the order of work: that of the head, or of `seen_from`."""
        seen = self.revisions
        return [one for one in self.manifests.values() if one.revision == seen.of(one.iteration, one.stage)]

    @property
    def kept(self) -> dict[str, Manifest]:
        """Manifests whose parts must be there, by key."""
        return {key: manifest for key, manifest in self.manifests.items() if key not in self.retired}

    @property
    def unfinished(self) -> dict[str, Part]:
        """Pieces of stages that are not committed, by key."""
        return {key: part for key, part in self.pieces.items() if layout.stage_of(key) not in self.manifests}

    def parts(self, pushed_out: Collection[str] = ()) -> dict[str, Part]:
        """All parts that must be there, by key, once the manifests `pushed_out` are retired too."""
        retired = {*self.retired, *pushed_out}
        named = [one.lasted() if key in retired else one for key, one in self.manifests.items()]
        pieces = {part.key: part for part in self.unfinished.values()}
        return pieces | {part.key: part for one in named for part in one.parts}


class RunSummary(BaseModel, frozen=True, extra="forbid"):
    run: str  # id of the run
    iteration: int | None  # newest iteration that has a committed stage
    stage: str | None = None  # last committed stage of it
    finished: datetime | None = None  # time of that commit (UTC)
    driven_by: str | None = None  # the process that drives the run now
    parent: str | None = None  # the run that this one was forked from
    damaged: str | None = None  # reason why a record behind these figures cannot be read; None if all can


def runs(root: Root) -> list[str]:
    return [name for name, is_run in _folders(root).items() if is_run]


def _folders(root: Root) -> dict[str, bool]:
    """Folders with names of runs, sorted, each with whether it is a run."""
    candidates = [name for name in root.folders() if is_run_name(name)]

    def is_run(name: str) -> bool:
        try:
            return root.exists(layout.run_config_key(name))
        except StorageUnavailable:  # something is there that cannot be looked at: its own commands say so
            return True

    return dict(zip(candidates, each(is_run, candidates, _READERS), strict=True))


def require_run(root: Root, run: str) -> None:
    """Refuse a run that does not exist, or is being removed. Raises InputError, which names the runs that exist."""
    check_not_removed(root, check_run_name(run))
    if not root.exists(layout.run_config_key(run)):
        there = f"which has {', '.join(runs(root)) or 'no runs'}"
        raise InputError(f"there is no run {run!r} in {root.url}, {there}: check --root and the name")


def require_runs(root: Root) -> list[str]:
    """All runs. Raises InputError if there are none: of a place that is named wrongly nothing is known to be sound."""
    if not (found := runs(root)):
        raise InputError(f"there are no runs in {root.url}: check the name of the root")
    return found


def stored_states(root: Root, run: str, stage: str, recorded: Names) -> list[int]:
    """Iterations whose train states, which `stage` makes, are kept and were stored, sorted."""
    newest = recorded.newest
    loaded = each(lambda at: load(root, newest[at, stage]), recorded.kept(stage), _READERS)
    return [one.iteration for one in loaded if one.parts]


def check_not_removed(root: Root, run: str) -> None:
    """Refuse a run whose removal was begun. Raises InputError, or WrongRecord if the record is of another run."""
    try:
        records.read(root, layout.removal_key(run), Removal)
    except NotCommitted:
        return
    raise InputError(f"run {run!r} is being removed: finish that with `ratchet rm {run}`, or take another name")


def names(root: Root, run: str, iteration: int | None = None, revisions: Revisions | None = None) -> Names:
    """The names of a run's records, of all or of one iteration; two listings. `revisions` are the run's, seen from the
    one that counts; by default they are read, and the head counts."""
    folder = layout.manifest_folder(run) if iteration is None else layout.iteration_folder(run, iteration)
    keys = root.keys(folder)
    there, manifests = set(keys), tuple(key for key in keys if layout.is_manifest(key))
    found = Names(
        manifests=manifests,
        retired=frozenset(key for key in manifests if layout.retired_key(key) in there),
        pieces=tuple(key for key in keys if layout.is_piece(key)),
        attempts=tuple(key for key in keys if layout.is_attempt(key)),
        increments=tuple(key for key in keys if layout.piece_of_increment(key) is not None),
        revisions=read_revisions(root, run) if revisions is None else revisions,
    )
    if revisions is None:  # given ones may be older than what another process has made since
        check_asked(root, run, found)
    return found


def check_asked(root: Root, run: str, recorded: Names) -> None:
    """Refuse work that was done in a revision of which no record is there: another request would take it for its own.
    Raises WrongRecord if there is such work."""
    last = len(recorded.revisions.reruns)
    made = (*recorded.manifests, *recorded.pieces, *recorded.attempts, *recorded.increments)
    beyond = [key for key in made if layout.revision_of(key) > last]
    if beyond:
        record = layout.rerun_key(run, layout.revision_of(beyond[0]))
        raise WrongRecord(
            f"{root.url}/{beyond[0]} was made in a revision whose record {record} is lost, so it is not known which "
            f"revision is the head. Restore the record from a copy of the root, or remove all that was made there: "
            f"{len(beyond)} objects of that number and higher ones"
        )


def names_of(root: Root, run: str, revision: int | None) -> Names:
    """The names of a run's records, seen from a revision, by default the head. Raises InputError if there is none."""
    recorded = names(root, run)
    return recorded if revision is None else replace(recorded, revisions=recorded.revisions.seen(revision))


def contents(root: Root, run: str, recorded: Names | None = None) -> Contents:
    """Read everything that a run has recorded. With `recorded`, only these are read. Raises DigestMismatch or
    SchemaMismatch if a record is damaged or of another format."""

    found, failed = _contents(root, run, recorded or names(root, run))
    for _, error in failed:
        raise error
    return found


def survey(root: Root, run: str, recorded: Names | None = None) -> tuple[Contents, list[Unreadable]]:
    """Like `contents`, but unreadable records are named and left out."""
    found, failed = _contents(root, run, recorded or names(root, run))
    return found, [Unreadable(run=layout.run_of(key), key=key, reason=str(error)) for key, error in failed]


def _contents(root: Root, run: str, recorded: Names) -> tuple[Contents, list[tuple[str, StorageError]]]:
    """All that can be read, and the errors of the rest, each with its key."""
    failed: list[tuple[str, StorageError]] = []

    def read_all[T](keys: Iterable[str], read: Callable[[str], T]) -> dict[str, T]:
        def attempt(key: str) -> tuple[str, T | StorageError | None]:
            try:
                return key, read(key)
            except NotCommitted:  # deleted since it was listed
                return key, None
            except (DigestMismatch, SchemaMismatch) as error:
                return key, error

        found: dict[str, T] = {}
        for key, value in each(attempt, keys, _READERS):
            if isinstance(value, StorageError):
                failed.append((key, value))
            elif value is not None:
                found[key] = value
        return found

    manifests = read_all(recorded.manifests, lambda key: load(root, key))
    pieces = read_all(recorded.pieces, lambda key: read_piece(root, key))
    wholes = {layout.retired_key(key): key for key in recorded.manifests if key in recorded.retired}
    retired = read_all(wholes, lambda key: _retirement(root, key, manifests.get(wholes[key])))
    gone = {wholes[key]: record for key, record in retired.items()}
    return Contents(run, in_order(manifests), gone, pieces, recorded.revisions), failed


def _retirement(root: Root, key: str, manifest: Manifest | None) -> Retired:
    record = records.read(root, key, Retired)
    if manifest is not None and record.manifest != manifest.digest:
        fact = f"{root.url}/{key} says that manifest {record.manifest} was retired, and {manifest.digest} is there"
        raise WrongRecord(f"{fact}: it was copied by hand. Remove it, or restore the original")
    return record


def summaries(root: Root) -> list[RunSummary]:
    """All runs of a root, sorted by name, also those whose removal was begun; from the newest manifests of each."""
    found = _folders(root)
    there, others = ([name for name, is_run in found.items() if is_run is wanted] for wanted in (True, False))
    left = each(lambda name: root.exists(layout.removal_key(name)), others, _READERS)
    text = "its removal was begun and is not finished: `ratchet rm {}` finishes it"
    gone = [RunSummary(run=one, iteration=None, damaged=text.format(one)) for one in itertools.compress(others, left)]
    return sorted([*each(lambda run: _summary(root, run), there, _READERS), *gone], key=lambda one: one.run)


def _summary(root: Root, run: str) -> RunSummary:
    iteration: int | None = None
    try:
        recorded = names(root, run)
        iteration = max((number for number, _ in recorded.newest), default=None)
        last = [load(root, key) for (number, _), key in recorded.newest.items() if number == iteration]
        first = [load(root, recorded.manifests[0])] if iteration else []
        entry = holder(root, run)
    except StorageError as error:
        return RunSummary(run=run, iteration=iteration, damaged=str(error))
    stage = next(reversed(in_order({one.stage: one for one in last}).values()), None)
    origin = next((one.origin for one in (*first, *last) if one.origin), None)
    done = {"stage": stage.stage, "finished": stage.finished} if stage else {}
    driven_by, parent = describe(entry) if entry else None, origin.run if origin else None
    return RunSummary(run=run, iteration=iteration, driven_by=driven_by, parent=parent, **done)


def in_order(manifests: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """The same manifests in the order of work: by iteration, and within one each after those it was made from."""
    digests = {key: manifest.digest for key, manifest in manifests.items()}
    known = {digests[key]: manifest for key, manifest in manifests.items()}
    steps: dict[str, int] = {}

    def step(digest: str) -> int:
        if digest not in steps:
            one = known[digest]
            before = [key for key in one.inputs.values() if key in known and known[key].iteration == one.iteration]
            steps[digest] = 1 + max(map(step, before), default=0)
        return steps[digest]

    def place(key: str) -> tuple[int, int, datetime, int]:
        one = manifests[key]
        return one.iteration, step(digests[key]), one.finished, one.revision

    return {key: manifests[key] for key in sorted(manifests, key=place)}
