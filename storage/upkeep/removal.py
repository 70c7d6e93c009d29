"""Removing a whole run. A record says so first, so that nothing begins with it, and is deleted last: a removal that was
killed is finished by doing it again."""

from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import batched

from pydantic import BaseModel

from storage import layout, records
from storage.backends.backend import Stored
from storage.backends.root import Root
from storage.errors import InputError
from storage.ids import check_run_name
from storage.manifest import Fence
from storage.parallel import each
from storage.upkeep.catalog import Removal

_BATCH, _REMOVERS = 64, 8


class Removed(BaseModel, frozen=True, extra="forbid"):
    run: str
    objects: int
    bytes: int  # what their removal frees; objects with further names, by hard links of forks, free nothing


def what_is_there(root: Root, run: str) -> Removed:
    """All that is stored under a name, a complete run or not. Raises InputError if there is nothing."""
    there = root.stored(check_run_name(run))
    if not there:
        raise InputError(f"there is nothing under the name {run!r} in {root.url}: check --root and the name")
    return Removed(run=run, objects=len(there), bytes=sum(not one.shared and one.bytes for one in there))


def remove(root: Root, run: str, fence: Fence) -> Removed:
    """Remove all of a run but its lease, which `forget` removes once it is released. Repeated, it goes on. Raises
    InputError if there is no such run, LeaseLost from the fence (the rest is not removed)."""
    there = what_is_there(root, run)
    key = layout.removal_key(run)
    records.publish(root, key, Removal(time=datetime.now(UTC)))
    fence.check()
    root.remove(layout.run_config_key(run))
    for one in root.uploads(run):
        root.abort_upload(one.key, one.id)
    kept = (key, f"{layout.lease_folder(run)}/")
    _delete(root, [one for one in root.stored(run) if not one.key.startswith(kept)], fence)
    return there


def forget(root: Root, run: str) -> None:
    """Remove the lease of a removed run, and last the record of its removal: the name is free again."""
    _delete(root, root.stored(layout.lease_folder(run)))
    root.remove(layout.removal_key(run))
    root.remove_empty(run)


def _delete(root: Root, objects: Iterable[Stored], fence: Fence | None = None) -> None:
    for some in batched(objects, _BATCH):
        if fence is not None:
            fence.check()
        each(lambda one: root.remove(one.key), some, _REMOVERS)
