"""Upkeep of all runs of a root: garbage, archives, verification. It may be killed and repeated at any time.

Train states are retired by the process that drives a run alone, because it knows the run's settings."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, computed_field

from flows.views.output import count, size, some
from storage.backends.root import Root
from storage.errors import LeaseHeld, RatchetError, StorageInterrupted
from storage.ownership.lease import hold
from storage.upkeep.archive import compact_new, without_texts
from storage.upkeep.beside import collect_beside, verify_beside
from storage.upkeep.catalog import require_run, require_runs
from storage.upkeep.retention import collect
from tasks.config.environment import without_secrets
from tasks.data.tokenizer import texts_of
from tasks.stages.names import WORKFLOW

OWNER = "ratchet maintain"
_SHOWN = 5  # findings of a verification that a report names


class Upkeep(BaseModel, frozen=True, extra="forbid"):
    gc: bool = True
    """Delete what nothing refers to any more, and what is left of train states that retention has retired."""
    compact: bool = True  # write what is new of each run's samples to its archive
    verify: bool = True  # read everything that is stored, and compare it with its digests


class RunUpkeep(BaseModel, frozen=True, extra="forbid"):
    """The upkeep of one run: objects and bytes deleted, samples archived, bytes verified."""

    run: str
    driven: bool = False  # True if another process drove it, so that only what that process cannot use was deleted
    removed: int = 0
    removed_bytes: int = 0
    archived: int = 0
    verified_bytes: int = 0
    problems: tuple[str, ...] = ()


class Maintenance(BaseModel, frozen=True, extra="forbid"):
    root: str
    runs: tuple[RunUpkeep, ...]

    @computed_field
    @property
    def healthy(self) -> bool:
        return not any(one.problems for one in self.runs)


def maintain_root(
    root: Root, upkeep: Upkeep, chosen: Sequence[str] = (), say: Callable[[str], object] = lambda _: None
) -> Maintenance:
    """Do the upkeep of all runs, or of the chosen ones; `say` is called with a line for each finished run. Raises
    InputError if a chosen run does not exist, or none, StorageInterrupted if the store does not answer."""
    for name in chosen:
        require_run(root, name)
    done: list[RunUpkeep] = []
    for name in chosen or require_runs(root):
        done.append(_kept_up(root, name, upkeep))
        say(line_of(done[-1]))
    return Maintenance(root=root.url, runs=tuple(done))


def line_of(one: RunUpkeep) -> str:
    driven = ", beside the process that drives it" if one.driven else ""
    verdict = "; ".join(one.problems) or "no problem"
    deleted = f"{count(one.removed, 'object')} deleted, {size(one.removed_bytes)} freed{driven}"
    return f"run {one.run}: {deleted}, {one.archived} samples archived, {size(one.verified_bytes)} verified: {verdict}"


def _kept_up(root: Root, run: str, upkeep: Upkeep) -> RunUpkeep:
    """Do what is asked for; each piece of work is tried, whatever becomes of the others."""
    done: dict[str, Any] = {}
    problems: list[str] = []
    for wanted, work in ((upkeep.gc, _clean), (upkeep.compact, _compact), (upkeep.verify, _verify)):
        try:
            problems += work(root, run, done) if wanted else []
        except StorageInterrupted:
            raise  # it would be the same for every other run
        except RatchetError as error:
            problems.append(str(error))
    return RunUpkeep(run=run, problems=tuple(dict.fromkeys(map(without_secrets, problems))), **done)


def _clean(root: Root, run: str, done: dict[str, Any]) -> list[str]:
    require_run(root, run)
    try:
        with hold(root, run, OWNER) as lease:
            found = collect(root, WORKFLOW, run, apply=True, fence=lease)
    except LeaseHeld:
        done["driven"] = True
        found = collect_beside(root, WORKFLOW, run)
    done |= {"removed": len(found.garbage), "removed_bytes": found.bytes}
    return [f"{one.key} cannot be read, so no part is deleted: {one.reason}" for one in found.unreadable]


def _compact(root: Root, run: str, done: dict[str, Any]) -> list[str]:
    made = compact_new(root, WORKFLOW, run, lambda: texts_of(root, run) or without_texts)
    done["archived"] = sum(one.rows for one in made)
    return []


def _verify(root: Root, run: str, done: dict[str, Any]) -> list[str]:
    found = verify_beside(root, run)
    done["verified_bytes"] = found.bytes
    faults = [f"{one.key} is {one.fault}: {one.detail}" for one in found.findings if not one.is_harmless]
    return [f"not sound: {some(faults, _SHOWN, f': `ratchet verify {run}`', '; ')}"] if faults else []
