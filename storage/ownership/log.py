"""The log of a lease: numbered entries without gaps, each published put-if-absent. The newest says who drives the run.

Pruning frees numbers: an append counts only if a second look shows that its number is the newest."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, NonNegativeInt

from storage import layout, records
from storage.backends.root import Root
from storage.errors import DigestMismatch, NotCommitted, SchemaMismatch, WrongRecord
from storage.ownership.process import Owner
from storage.parallel import each

KEPT_ENTRIES = 32
"""Number of the newest entries that stay. A listing is not atomic: one that takes as long as this many renewals could
miss both an entry that is removed meanwhile and the one that is written."""

_PRUNED_AT_ONCE = 1024
_REMOVERS = 8


class Entry(BaseModel, frozen=True, extra="forbid"):
    format_version: Literal[1] = 1  # version of this record's own format
    number: int  # position in the log, from 1
    kind: Literal["acquired", "renewed", "released"]
    epoch: int  # fencing token: number of the entry by which this holder acquired the lease
    token: str  # random: distinguishes this acquisition from all others
    owner: Owner  # the holder; of a `released` entry, the process that ended it
    written: datetime  # by the holder's clock (UTC)
    expires: datetime
    """End of the holder's period without another entry. Other hosts watch for that long on their own clocks."""

    choices: NonNegativeInt
    """Choices of a head when the lease was acquired or released, so that the last one is not lost unnoticed."""

    @property
    def seconds(self) -> float:
        return (self.expires - self.written).total_seconds()


def newest(root: Root, run: str) -> Entry | None:
    """The newest entry of a run's log, or None if there is none. Raises DigestMismatch or SchemaMismatch if it cannot
    be read, so it is not known which process drives the run."""
    number = newest_number(root, run)
    while number is not None:
        try:
            return read(root, run, number)
        except (DigestMismatch, SchemaMismatch) as error:
            fact = f"it is not known which process drives run {run}: {error}"
            raise type(error)(f"{fact}. If none drives it, `ratchet unlock {run} --force` frees the run") from error
        except NotCommitted:  # removed since it was listed
            later = newest_number(root, run)
            if later == number:
                raise
            number = later
    return None


def newest_number(root: Root, run: str) -> int | None:
    """The number of the newest entry, which is enough to know whether it is one's own."""
    return max(_numbers(root, run), default=None)


def read(root: Root, run: str, number: int) -> Entry:
    """The entry with that number; raises as `records.read`."""
    return records.read(root, layout.lease_key(run, number), Entry)


def append(root: Root, run: str, entry: Entry) -> Entry:
    """Publish `entry` under its number; returns the newest entry, which is another one if that failed."""
    published = records.publish(root, layout.lease_key(run, entry.number), entry)
    number = newest_number(root, run)
    if published and number == entry.number:
        return entry
    if number is None or number <= entry.number:  # the answer was lost, or a listing is behind (network filesystems)
        try:
            return read(root, run, entry.number)
        except NotCommitted:  # removed since it was listed, because others have followed
            later = newest(root, run)
            if later is None:
                raise
            return later
    return newest(root, run) or entry


def prune(root: Root, run: str, number: int, kept: int) -> None:
    """Remove entries up to `number`, but for the newest `kept` of them."""
    old = [one for one in _numbers(root, run) if one <= number - kept]
    each(lambda one: root.remove(layout.lease_key(run, one)), old[:_PRUNED_AT_ONCE], _REMOVERS)


def recorded_choices(root: Root, run: str) -> int:
    _, choices = layout.revision_numbers(root.keys(layout.revision_folder(run)))
    return max(choices, default=0)


def check_choices(root: Root, run: str, entry: Entry | None) -> int:
    """Number of recorded choices of a head. Raises WrongRecord if it is smaller than at an entry: one is lost."""
    recorded = recorded_choices(root, run)
    if entry is not None and recorded < entry.choices:
        raise WrongRecord(
            f"{root.url}/{layout.choice_key(run, entry.choices)} is lost, and its copy too: it said which revision is "
            f"the head. Restore it from a copy of the root, or accept the head that is left with `ratchet unlock {run} "
            "--force`"
        )
    return recorded


def _numbers(root: Root, run: str) -> list[int]:
    numbers = map(layout.lease_number, root.keys(layout.lease_folder(run)))
    return [number for number in numbers if number is not None]
