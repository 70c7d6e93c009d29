"""Parts of a run that manifests of other runs name, so that its own cleaning leaves them alone.

Two rules make this cheap to know without reading every run of a root, each enforced in one place: `commit` refuses a
manifest that names parts of another run and has no `origin`; and `fork` publishes manifests with an origin so that they
fill the first iterations of their run without a gap, before its `run.json`. So a run whose iteration 0 has no origin
shares nothing, and what a run shares does not change once it has had a `run.json` for longer than any fork takes.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import batched, groupby

from storage import layout, records
from storage.backends.root import Root, Stored
from storage.errors import DigestMismatch, NotCommitted, SchemaMismatch, StorageError
from storage.ids import is_run_name
from storage.manifest import load
from storage.parallel import each
from storage.upkeep.catalog import Retired, Unreadable

logger = logging.getLogger(__name__)

_READERS = 8
_AT_ONCE = 16  # iterations
_SETTLES = timedelta(days=1)
"""An older run shares nothing new, even if it was started under a name while a fork of that name was being made."""


@dataclass(frozen=True)
class Shared:
    """What other runs name."""

    manifests: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Keys of this run's parts that each manifest of another run names; those that name none are left out."""
    unreadable: tuple[Unreadable, ...] = ()
    """Records that may name more."""

    def parts(self, without: Collection[str] = ()) -> set[str]:
        """Keys of all named parts; manifests `without` do not count."""
        return {part for key, parts in self.manifests.items() if key not in without for part in parts}


@dataclass(frozen=True)
class _Read:
    """The relevant content of one manifest of another run."""

    shares: bool
    """Whether it shares parts of any run; True if that is not known."""
    parts: frozenset[str] = frozenset()
    """Keys of parts of this run that it names."""
    unreadable: Unreadable | None = None


@dataclass(frozen=True)
class _Past:
    """What another run shares."""

    born: Stored | None
    """Its `run.json`; None while it is not a run yet."""
    shared: Shared


class SharedParts:
    """Finds the manifests of other runs that name parts of `run`.

    A process that looks often keeps it: then it only checks whether each other run is still the same, and reads what is
    new.
    """

    def __init__(self, root: Root, run: str) -> None:
        self._root, self._run = root, run
        self._pasts: dict[str, _Past] = {}
        self._read: dict[Stored, _Read] = {}
        self._reported: set[str] = set()

    def look(self) -> Shared:
        """What is named now. A fork that publishes a manifest later sees all retirements recorded before this call."""
        others = [name for name in self._root.folders() if name != self._run and is_run_name(name)]
        pasts = dict(zip(others, each(self._past, others, _READERS), strict=True))
        before = datetime.now(UTC) - _SETTLES
        self._pasts = {
            name: past
            for name, past in pasts.items()
            if past.born is not None and past.born.modified < before and not past.shared.unreadable
        }
        return _joined(past.shared for past in pasts.values())

    def named(self, candidates: Collection[str]) -> Shared:
        """Like `look`, without the manifests that name candidates and that their own run has retired."""
        found = self.look()
        wanted = set(candidates)
        naming = [key for key, parts in found.manifests.items() if parts & wanted]
        gone = each(lambda key: self._is_released(key, found.manifests[key]), naming, _READERS)
        released = {key for key, retired in zip(naming, gone, strict=True) if retired}
        if not released:
            return found
        # look again: a fork that shared a part of one of those just before it was retired is visible by now
        found = self.look()
        kept = {key: parts for key, parts in found.manifests.items() if key not in released}
        return Shared(kept, found.unreadable)

    def _is_released(self, key: str, parts: Collection[str]) -> bool:
        """Whether the run of a manifest has retired it; a record that is not of this manifest releases nothing."""
        try:
            return set(parts) <= set(records.read(self._root, layout.retired_key(key), Retired).keys)
        except (NotCommitted, DigestMismatch, SchemaMismatch):
            return False

    def report(self, unreadable: Iterable[Unreadable]) -> None:
        """Warn once for each record that no part is deleted as long as it cannot be read."""
        for one in unreadable:
            if one.key not in self._reported:
                self._reported.add(one.key)
                text = "no part of run %s is deleted, because a record of run %s that may name it cannot be read: %s"
                logger.warning(text, self._run, one.run, one.reason)

    def _past(self, run: str) -> _Past:
        try:
            born = self._root.info(layout.run_config_key(run))  # before its manifests: later ones are its own work
            known = self._pasts.get(run)
            if known is not None and known.born == born:
                return known
            return _Past(born, _joined(self._shared(run)))
        except StorageError as error:
            return _Past(None, Shared(unreadable=(Unreadable.of(layout.manifest_folder(run), error),)))

    def _shared(self, run: str) -> Iterator[Shared]:
        """What a run shares, a few iterations at a time; reading ends with the first that shares nothing."""
        read = self._read_all(_manifests(self._root.stored(layout.iteration_folder(run, 0))))
        yield _found(read)
        if not any(one.shares for one in read.values()):
            return
        objects = _manifests(self._root.stored(layout.manifest_folder(run)))
        later = groupby((one for one in objects if _iteration(one)), _iteration)
        for some in batched(([*group] for _, group in later), _AT_ONCE):
            read = self._read_all(one for group in some for one in group)
            for group in some:
                if not any(read[one].shares for one in group):
                    return
                yield _found({one: read[one] for one in group})

    def _read_all(self, objects: Iterable[Stored]) -> dict[Stored, _Read]:
        wanted = list(objects)
        new = [one for one in wanted if one not in self._read]
        read = dict(zip(new, each(self._load, new, _READERS), strict=True))
        self._read |= {one: found for one, found in read.items() if found.unreadable is None}
        return {one: read.get(one) or self._read[one] for one in wanted}

    def _load(self, one: Stored) -> _Read:
        try:
            manifest = load(self._root, one.key)
        except StorageError as error:
            return _Read(True, unreadable=Unreadable.of(one.key, error))
        keys = frozenset(part.key for part in manifest.parts)
        foreign = not all(layout.is_part_of(key, layout.run_of(one.key)) for key in keys)
        own = frozenset(key for key in keys if layout.is_part_of(key, self._run))
        return _Read(foreign or manifest.origin is not None, own)


def _manifests(objects: Iterable[Stored]) -> list[Stored]:
    return sorted((one for one in objects if layout.is_manifest(one.key)), key=_iteration)


def _iteration(one: Stored) -> int:
    place = layout.place_of(one.key)
    return place[0] if place else 0


def _found(read: Mapping[Stored, _Read]) -> Shared:
    unreadable = tuple(found.unreadable for found in read.values() if found.unreadable is not None)
    return Shared({one.key: found.parts for one, found in read.items() if found.parts}, unreadable)


def _joined(found: Iterable[Shared]) -> Shared:
    everything = list(found)
    manifests = {key: parts for one in everything for key, parts in one.manifests.items()}
    return Shared(manifests, tuple(unreadable for one in everything for unreadable in one.unreadable))
