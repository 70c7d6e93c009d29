"""Reading everything that a run has stored, and naming what is not as it was written."""

import json
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import partial

from pydantic import BaseModel, ConfigDict, computed_field

from storage import layout, records
from storage.attempts import Attempt
from storage.backends.root import Root, open_root
from storage.digest import bytes_digest
from storage.errors import DigestMismatch, InputError, NotCommitted, PartMissing, SchemaMismatch, StorageError
from storage.manifest import Part, load
from storage.parallel import each
from storage.parts import is_intact, read_part_buffer
from storage.revisions import FIRST, Revisions, read_revisions
from storage.selection import SOURCES, Source, read_sources
from storage.upkeep.catalog import Contents, names, survey
from storage.upkeep.shared import SharedParts

_READERS = 4


class Problem(StrEnum):
    """What can be wrong with an object."""

    DAMAGED = "damaged"
    """It is not what was written."""
    MISSING = "missing"
    """A manifest or piece names it, and it is not there."""
    UNKNOWN_INPUT = "unknown-input"
    """It was made from a manifest that the run does not have."""
    SOURCE_GONE = "source-gone"
    """Samples were copied from a rollout that is not there any more. Harmless: they are there."""
    ORPHANED = "orphaned"
    """Nothing names it: left by a crash, or part of a stage in progress. Harmless; gc deletes it after a day."""


_HARMLESS = (Problem.ORPHANED, Problem.SOURCE_GONE)


class Finding(BaseModel):
    """One object that is not as it should be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fault: Problem
    key: str
    """Key below the storage root."""
    detail: str
    """What was found."""


class Verification(BaseModel):
    """What a verification has read and found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    manifests: int
    """Manifests read."""
    parts: int
    """Parts read, including those shared with other runs."""
    bytes: int
    """Their size."""
    retired: int
    """Manifests whose parts retention has deleted."""
    findings: tuple[Finding, ...]

    @computed_field
    @property
    def sound(self) -> bool:
        """Whether everything needed is there and intact; orphans and sources that are gone do no harm."""
        return all(finding.fault in _HARMLESS for finding in self.findings)


def verify(root: Root, run: str) -> Verification:
    """Hash every object of a run again and follow every reference."""
    stored, findings = _readable(root, run)
    parts = {part.key: part for manifest in stored.kept.values() for part in manifest.parts}
    parts |= {part.key: part for part in stored.unfinished.values()}
    findings += [found for found in each(lambda part: _part(root, part), parts.values(), _READERS) if found]
    findings += [
        *_config(root, run),
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
    """The readable records of a run, and findings for the rest."""
    revisions, flaws = _revisions(root, run)
    recorded = names(root, run, revisions=revisions)
    stored, unreadable = survey(root, run, recorded)
    findings = [Finding(fault=Problem.DAMAGED, key=one.key, detail=one.reason) for one in unreadable]
    return stored, [*findings, *flaws, *_attempts(root, recorded.attempts)]


def _revisions(root: Root, run: str) -> tuple[Revisions, list[Finding]]:
    """What was done again. If a record of it cannot be read, it is not known which revision is the head."""
    try:
        return read_revisions(root, run), []
    except (DigestMismatch, SchemaMismatch) as error:
        return FIRST, [Finding(fault=Problem.DAMAGED, key=layout.revision_folder(run), detail=str(error))]


def _attempts(root: Root, keys: Sequence[str]) -> Iterator[Finding]:
    def read(key: str) -> Finding | None:
        try:
            records.read(root, key, Attempt)
        except (DigestMismatch, SchemaMismatch) as error:
            return Finding(fault=Problem.DAMAGED, key=key, detail=str(error))
        except NotCommitted:  # deleted since it was listed, as its stage is committed
            return None
        return None

    yield from filter(None, each(read, keys, _READERS))


def _part(root: Root, part: Part) -> Finding | None:
    try:
        read_part_buffer(root, part)
    except DigestMismatch as error:
        return Finding(fault=Problem.DAMAGED, key=part.key, detail=str(error))
    except PartMissing as error:
        return Finding(fault=Problem.MISSING, key=part.key, detail=str(error))
    return None


def _config(root: Root, run: str) -> Iterator[Finding]:
    key = layout.run_config_key(run)
    try:
        json.loads(records.unseal_older(root.read_bytes(key), f"{root.url}/{key}"))
    except NotCommitted:
        yield Finding(fault=Problem.MISSING, key=key, detail="the run has no configuration")
    except DigestMismatch as error:
        yield Finding(fault=Problem.DAMAGED, key=key, detail=str(error))
    except ValueError as error:
        yield Finding(fault=Problem.DAMAGED, key=key, detail=f"the configuration is not JSON: {error}")


def _inputs(stored: Contents) -> Iterator[Finding]:
    known = {manifest.digest for manifest in stored.manifests.values()}
    for key, manifest in stored.manifests.items():
        for role, digest in manifest.inputs.items():
            if digest not in known:
                detail = f"its input {role!r} was manifest {digest}, which the run does not have"
                yield Finding(fault=Problem.UNKNOWN_INPUT, key=key, detail=detail)


def _sources(root: Root, stored: Contents) -> Iterator[Finding]:
    """Of each selection the rollouts that are not what was selected from."""
    for key, manifest in stored.kept.items():
        if SOURCES in manifest.part_names and is_intact(root, manifest.part(SOURCES)):
            found = each(partial(_source, root, key), read_sources(root, manifest), _READERS)
            yield from (one for one in found if one)


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
        if layout.is_temporary(key):
            continue
        try:
            digest = bytes_digest(root.read_buffer(key))
        except NotCommitted:  # another process has replaced it since it was listed
            continue
        if not digest.startswith(layout.digest_in_name(key) or "?"):
            yield Finding(fault=Problem.DAMAGED, key=key, detail=f"its digest is {digest}: write it again with compact")


def _orphans(root: Root, run: str, named: set[str]) -> Iterator[Finding]:
    there = {stored.key: stored for stored in root.stored(layout.part_folder(run))}
    unnamed = set(there) - named
    if unnamed:
        elsewhere = SharedParts(root, run).look()
        # an orphan does no harm, so none is reported while it is not known what is named
        unnamed = set() if elsewhere.unreadable else unnamed - elsewhere.parts()
    for key in sorted(unnamed):
        detail = f"{there[key].bytes} bytes of {there[key].modified:%Y-%m-%d %H:%M} that no manifest names"
        yield Finding(fault=Problem.ORPHANED, key=key, detail=detail)
