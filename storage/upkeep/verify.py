"""Reading everything that a run has stored, and naming what is not as it was written."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial

from pydantic import BaseModel, computed_field
from pydantic_core import from_json

from storage import layout, records
from storage.backends.root import Root, open_root
from storage.digest import bytes_digest
from storage.errors import (
    DigestMismatch,
    InputError,
    NotCommitted,
    PartMissing,
    SchemaMismatch,
    StorageError,
    StorageUnavailable,
)
from storage.exchanges import Exchange
from storage.manifest import load
from storage.ownership import log
from storage.parallel import each
from storage.parts import is_intact, read_part_buffer
from storage.revisions import FIRST, uncopied
from storage.selection import SOURCES, Source, read_sources
from storage.unfinished import Attempt, lost_increments, read_increment
from storage.upkeep.catalog import Contents, names, survey

_READERS = 4


class Problem(StrEnum):
    DAMAGED = "damaged"  # it is not what was written
    MISSING = "missing"  # a manifest or piece names it, or another record follows it, and it is not there
    UNKNOWN_INPUT = "unknown-input"  # it was made from a manifest that the run does not have
    SOURCE_GONE = "source-gone"
    """Samples were copied from a rollout that is not there any more. Harmless: they are there."""
    UNCOPIED = "uncopied"
    """Its second copy is lost, or was not written. Harmless; the next process that drives the run writes it."""
    STRAY = "stray"  # it is none of a run's objects. Harmless: nothing reads it.
    ORPHANED = "orphaned"
    """Nothing names it: left by a crash, or part of a stage in progress. Harmless; gc deletes it after a day."""


_HARMLESS = (Problem.ORPHANED, Problem.SOURCE_GONE, Problem.UNCOPIED, Problem.STRAY)


class Finding(BaseModel, frozen=True, extra="forbid"):
    fault: Problem
    key: str  # key below the storage root
    detail: str  # the finding, in words

    @property
    def is_harmless(self) -> bool:
        """True if everything that the run needs is there all the same."""
        return self.fault in _HARMLESS


class Verification(BaseModel, frozen=True, extra="forbid"):
    run: str
    manifests: int  # manifests read
    parts: int  # parts read
    bytes: int  # their size
    retired: int  # manifests whose parts retention has deleted
    findings: tuple[Finding, ...]

    @computed_field
    @property
    def sound(self) -> bool:
        """True if everything needed is there and intact."""
        return all(finding.is_harmless for finding in self.findings)


def verify(root: Root, run: str) -> Verification:
    """Hash every object of a run again and follow every reference."""
    try:
        return _verified(root, run)
    except StorageUnavailable as error:  # a folder in place of a record, or the reverse; links; permissions
        return Verification(run=run, manifests=0, parts=0, bytes=0, retired=0, findings=(_damaged(run, error),))


def _damaged(key: str, why: object) -> Finding:
    return Finding(fault=Problem.DAMAGED, key=key, detail=str(why))


def _verified(root: Root, run: str) -> Verification:
    stored, findings = _readable(root, run)
    parts = stored.parts()
    findings += _unreadable(list(parts), lambda key: read_part_buffer(root, parts[key]))
    findings += [
        *_config(root, run),
        *_copies(root, run),
        *_leases(root, run),
        *_strays(root, run),
        *_inputs(stored),
        *_sources(root, stored),
        *_archives(root, run),
        *_orphans(root, run, set(parts)),
    ]
    return Verification(
        run=run,
        manifests=len(stored.manifests),
        parts=len(parts),
        bytes=sum(part.bytes for part in parts.values()),
        retired=len(stored.retired),
        findings=tuple(findings),
    )


def _readable(root: Root, run: str) -> tuple[Contents, list[Finding]]:
    flaws: list[Finding] = []
    try:
        revisions = names(root, run).revisions
    except (DigestMismatch, SchemaMismatch) as error:  # the head is not known
        revisions, flaws = FIRST, [_damaged(layout.revision_folder(run), error)]
    recorded = names(root, run, revisions=revisions)
    stored, unreadable = survey(root, run, recorded)
    findings = [_damaged(one.key, one.reason) for one in unreadable]
    asked = _unreadable(root.keys(layout.exchange_folder(run)), lambda key: records.read(root, key, Exchange))
    attempts = _unreadable(recorded.attempts, lambda key: records.read(root, key, Attempt))
    grown = _unreadable(recorded.increments, lambda key: read_increment(root, key))
    going_on = [  # gc deletes the others, one by one
        key
        for key in recorded.increments
        if layout.piece_of_increment(key) not in stored.pieces and layout.stage_of(key) not in stored.manifests
    ]
    detail = "later increments of the same piece are there"
    lost = [Finding(fault=Problem.MISSING, key=key, detail=detail) for key in lost_increments(going_on)]
    return stored, [*findings, *flaws, *asked, *attempts, *grown, *lost]


def _copies(root: Root, run: str) -> Iterator[Finding]:
    """Second copies that are not what their name says, and records without one."""

    def read(key: str) -> None:
        if record := layout.copied(key):
            data = root.read_bytes(key)
            records.unseal(data, f"{root.url}/{key}", record)
            if layout.copy_key(record, bytes_digest(data)) != key:
                raise DigestMismatch(f"{root.url}/{key} is not what its name says: it was renamed. Remove it")

    yield from _unreadable(root.keys(layout.copy_folder(run)), read)
    for key in uncopied(root, run):
        yield Finding(fault=Problem.UNCOPIED, key=key, detail="it has no second copy, so its loss would not be noticed")


def _leases(root: Root, run: str) -> Iterator[Finding]:
    numbers = map(layout.lease_number, root.keys(layout.lease_folder(run)))
    by_key = {layout.lease_key(run, number): number for number in numbers if number is not None}
    yield from _unreadable(list(by_key), lambda key: log.read(root, run, by_key[key]))
    newest = None
    with contextlib.suppress(DigestMismatch, SchemaMismatch):  # named with the other entries
        newest = log.newest(root, run)
    yield from _unreadable([layout.revision_folder(run)], lambda _: log.check_choices(root, run, newest))


def _strays(root: Root, run: str) -> Iterator[Finding]:
    for key in filter(layout.is_stray, root.keys(run)):
        shown = key.encode(errors="backslashreplace").decode()  # a name may be no text
        yield Finding(fault=Problem.STRAY, key=shown, detail="nothing of a run has this name, and nothing reads it")


def _unreadable(keys: Sequence[str], read: Callable[[str], object]) -> Iterator[Finding]:
    def attempt(key: str) -> Finding | None:
        try:
            read(key)
        except (DigestMismatch, SchemaMismatch) as error:
            return _damaged(key, error)
        except PartMissing as error:
            return Finding(fault=Problem.MISSING, key=key, detail=str(error))
        except NotCommitted:  # deleted since it was listed
            return None
        return None

    yield from filter(None, each(attempt, keys, _READERS))


def _config(root: Root, run: str) -> Iterator[Finding]:
    key = layout.run_config_key(run)
    try:
        from_json(records.unseal(root.read_bytes(key), f"{root.url}/{key}", key))
    except NotCommitted:
        yield Finding(fault=Problem.MISSING, key=key, detail="the run has no configuration")
    except (DigestMismatch, SchemaMismatch) as error:
        yield _damaged(key, error)
    except ValueError as error:
        yield _damaged(key, f"the configuration is not JSON: {error}")


def _inputs(stored: Contents) -> Iterator[Finding]:
    known = {manifest.digest for manifest in stored.manifests.values()}
    for key, manifest in stored.manifests.items():
        for role, digest in manifest.inputs.items():
            if digest not in known:
                detail = f"its input {role!r} was manifest {digest}, which the run does not have"
                yield Finding(fault=Problem.UNKNOWN_INPUT, key=key, detail=detail)


def _sources(root: Root, stored: Contents) -> Iterator[Finding]:
    """The rollouts that are not any more what a selection was made from."""
    for key, manifest in stored.kept.items():
        if SOURCES not in manifest.part_names or not is_intact(root, manifest.part(SOURCES)):
            continue
        try:
            sources = read_sources(root, manifest)
        except SchemaMismatch as error:
            yield _damaged(manifest.part(SOURCES).key, error)
        else:
            yield from filter(None, each(partial(_source, root, key), sources, _READERS))


def _source(root: Root, key: str, source: Source) -> Finding | None:
    try:
        there = load(root if source.root is None else open_root(source.root), source.key).digest
    except (StorageError, InputError) as error:
        detail = f"{source.selected} samples are from {source.place}, which cannot be read any more: {error}"
    else:
        if there == source.rollout:
            return None
        detail = f"{source.selected} samples are from rollout {source.rollout} of {source.place}; {there} is there now"
    return Finding(fault=Problem.SOURCE_GONE, key=key, detail=detail)


def _archives(root: Root, run: str) -> Iterator[Finding]:
    for key in root.keys(layout.archive_folder(run)):
        if layout.archive_span(key) is None:
            continue
        try:
            digest = bytes_digest(root.read_buffer(key))
        except NotCommitted:  # another process has replaced it since it was listed
            continue
        if not digest.startswith(layout.digest_in_name(key)):
            yield _damaged(key, f"its digest is {digest}: write it again with compact")


def _orphans(root: Root, run: str, named: set[str]) -> Iterator[Finding]:
    there = {one.key: one for one in root.stored(layout.part_folder(run)) if not layout.is_stray(one.key)}
    for key in sorted(set(there) - named):
        detail = f"{there[key].bytes} bytes of {there[key].modified:%Y-%m-%d %H:%M} that no manifest names"
        yield Finding(fault=Problem.ORPHANED, key=key, detail=detail)
