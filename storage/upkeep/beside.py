"""Cleaning and checking a run while another process drives it, which may find what an earlier attempt has left.

So only that is deleted which no stage in progress can find. That, and that the same process drives the run all the
time, is checked before every few deletions."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import batched

from storage import layout
from storage.backends.root import Root
from storage.ids import Workflow
from storage.ownership.log import newest
from storage.upkeep.catalog import names, survey
from storage.upkeep.retention import Collection, Garbage, collect, drop, is_old
from storage.upkeep.verify import Problem, Verification, verify

logger = logging.getLogger(__name__)

_BATCH = 16  # objects that are deleted between two looks


def collect_beside(root: Root, workflow: Workflow, run: str, now: datetime | None = None) -> Collection:
    """Delete what neither the run nor the process that drives it needs; without the run's lease. Train states are not
    retired: the process that drives the run does that. Returns what was deleted."""
    moment = now or datetime.now(UTC)
    found = collect(root, workflow, run, now=moment)
    cleaning = _Beside(root, run, _epoch(root, run), moment)
    return found.model_copy(update={"applied": True, "garbage": tuple(cleaning.deleted(found.garbage))})


def verify_beside(root: Root, run: str) -> Verification:
    """Like `verify`; a part that retention has deleted since its manifest was read is not missing."""
    found = verify(root, run)
    kept = tuple(one for one in found.findings if one.fault is not Problem.MISSING or not _is_retired(root, one.key))
    return found.model_copy(update={"findings": kept})


@dataclass(frozen=True)
class _Beside:
    root: Root
    run: str
    epoch: int | None
    moment: datetime

    def deleted(self, garbage: Iterable[Garbage]) -> Iterator[Garbage]:
        for some in batched(garbage, _BATCH):
            if _epoch(self.root, self.run) != self.epoch:
                logger.warning("run %s has another driver by now: the rest of its garbage is left for later", self.run)
                return
            settled = self._settled({one.key for one in some})
            for one in some:
                # the driver prunes its lease itself: where entries are missing, a process that was frozen could append
                leased = one.key.startswith(f"{layout.lease_folder(self.run)}/")
                waits = layout.is_part(one.key) and not layout.is_temporary(one.key) and one.key not in settled
                if one.upload is not None or not (leased or waits):
                    drop(self.root, one)
                    yield one

    def _settled(self, keys: Iterable[str]) -> set[str]:
        """The parts of iterations in which no stage is in progress, and which nothing names by now."""
        places = {key: place for key in keys if (place := layout.place_of(key)) and layout.is_part(key)}
        needed: dict[int, set[str] | None] = {number: self._needed(number) for number, _ in places.values()}
        return {
            key
            for key, (number, _) in places.items()
            if (named := needed[number]) is not None and key not in named and is_old(self.root, key, self.moment)
        }

    def _needed(self, iteration: int) -> set[str] | None:
        """Parts that an iteration names; None if that is not known, or a stage that was begun is not committed."""
        recorded = names(self.root, self.run, iteration)
        stored, unreadable = survey(self.root, self.run, recorded)
        committed = set(recorded.manifests)
        begun = {layout.stage_of(key) for key in (*recorded.attempts, *recorded.pieces, *recorded.increments)}
        return set(stored.parts()) if committed and begun <= committed and not unreadable else None


def _is_retired(root: Root, part: str) -> bool:
    place = layout.place_of(part)
    if place is None:
        return False
    recorded = names(root, layout.run_of(part), place[0])
    return any(layout.place_of(key) == place for key in recorded.retired)


def _epoch(root: Root, run: str) -> int | None:
    entry = newest(root, run)
    return None if entry is None or entry.kind == "released" else entry.epoch
