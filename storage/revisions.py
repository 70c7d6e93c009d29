"""Revisions: the manifests that belong to a run, once finished stages were done again (docs/storage.md, "Revisions").

A record that is lost would change the head, and nothing else would show it. So each has a second copy, under a name
with its digest. A copy without its record, or with another one, is an error; a record without its copy counts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from typing import Literal

from pydantic import BaseModel, JsonValue, NonNegativeInt, PositiveInt

from storage import layout, records
from storage.backends.root import Root
from storage.digest import bytes_digest
from storage.errors import InputError, WrongRecord
from storage.ids import StageName
from storage.parallel import each

_READERS = 8
_COPY_BACK, _RESTORE = "Copy {}", "Restore what was there from a copy of the root"


class Rerun(BaseModel, frozen=True, extra="forbid"):
    """Record that a finished stage is to be done again, written first: the next process that drives the run does it."""

    format_version: Literal[1] = 1  # version of this record's own format
    revision: PositiveInt  # number of the revision that it makes, which is also its own
    parent: NonNegativeInt  # the revision that it was asked in: the head at that time
    iteration: NonNegativeInt
    stage: StageName  # the stage that is done again
    behind: tuple[StageName, ...] = ()  # stages of the same iteration that are made from it
    later: bool = True  # True if the iterations that follow are made from it
    cascade: bool  # True if the result becomes the head, so that what is made from it is done again too
    new_seeds: bool = False  # True if samples are drawn with other seeds than the first time
    settings: dict[str, JsonValue] = {}
    """Settings that decide results and differ from those of the parent, by `section.key`."""
    until: NonNegativeInt  # last complete iteration when it was asked: that far a cascade goes
    choices: NonNegativeInt  # number of choices of a head that were made before
    reason: str  # the reason, in the words of the person who asked
    asked_by: str  # user and host, or the flow run
    request: str | None = None  # identity of the request: asked again under the same identity, it is the same rerun
    time: datetime  # time of the request (UTC)

    def __str__(self) -> str:
        return f"{self.stage} of iteration {self.iteration}"

    def is_behind(self, iteration: int, stage: str) -> bool:
        """True if a stage is made from the one that is done again."""
        return (self.later and iteration > self.iteration) or (iteration == self.iteration and stage in self.behind)


class Choice(BaseModel, frozen=True, extra="forbid"):
    format_version: Literal[1] = 1  # version of this record's own format
    revision: NonNegativeInt  # the head from now on
    goes_on: NonNegativeInt
    """The revision that has what is behind the repeated stage: an earlier one if the stage came to the same digest as
    there, so that nothing behind it is done again; otherwise `revision` itself."""
    reason: str  # the reason, in the words of the person who asked
    asked_by: str  # user and host, or the flow run
    time: datetime  # time of the request (UTC)


@dataclass(frozen=True)
class Revisions:
    """All revisions of a run, seen from one of them: by default the head."""

    reruns: tuple[Rerun, ...] = ()  # in the order of their numbers, from 1
    choices: tuple[Choice, ...] = ()  # in the order of time
    seen_from: int | None = None  # the revision that questions are answered for; None for the head

    @property
    def head(self) -> int:
        """The revision that the run consists of."""
        return self.choices[-1].revision if self.choices else 0

    @property
    def current(self) -> int:
        """The revision that questions are answered for."""
        return self.head if self.seen_from is None else self.seen_from

    @property
    def numbers(self) -> range:
        return range(len(self.reruns) + 1)

    def rerun(self, number: int) -> Rerun:
        return self.reruns[number - 1]

    def seen(self, number: int) -> "Revisions":
        """The same revisions, seen from `number`. Raises InputError if there is no such revision."""
        if number not in self.numbers:
            raise InputError(f"there is no revision {number}, only {[*self.numbers]}: `ratchet show` lists them")
        return replace(self, seen_from=number)

    def of(self, iteration: int, stage: str) -> int:
        """The number under which the manifest of a stage is found, or will be published."""
        number = self.current
        while number:
            rerun = self.rerun(number)
            if (iteration, stage) == (rerun.iteration, rerun.stage):
                return number
            number = self.goes_on(number) if rerun.is_behind(iteration, stage) else rerun.parent
            if number == rerun.revision:
                return number
        return 0

    def goes_on(self, number: int) -> int:
        """The revision that has what is behind the repeated stage of `number`, or an earlier one; a choice says."""
        return self._leads.get(number, number)

    @cached_property
    def _leads(self) -> dict[int, int]:
        return {choice.revision: choice.goes_on for choice in reversed(self.choices)}  # the first choice says

    @property
    def pending(self) -> Rerun | None:
        """The last rerun, unless its result or another revision was chosen since; withdrawn if another was."""
        last = self.reruns[-1] if self.reruns else None
        return last if last is not None and last.choices == len(self.choices) else None

    def requested(self, request: str) -> Rerun | None:
        return next((rerun for rerun in self.reruns if rerun.request == request), None)

    def settings(self) -> dict[str, JsonValue]:
        """Settings in which this revision differs from revision 0, by `section.key`."""
        number, found = self.current, {}
        while number:
            rerun, goes_on = self.rerun(number), self.goes_on(number)
            if goes_on == number:
                found = {**rerun.settings, **found}
            number = rerun.parent if goes_on == number else goes_on
        return found


FIRST = Revisions()  # those of a run of which nothing was done again


def read_revisions(root: Root, run: str) -> Revisions:
    """The revisions of a run: two listings, and a request for each record. Raises DigestMismatch if a record is
    damaged; SchemaMismatch for another format; WrongRecord if one is missing, replaced, or contradicts others."""
    copies = _copies(root, run)  # first: each is written after its record
    reruns, choices = layout.revision_numbers(root.keys(layout.revision_folder(run)))
    read = partial(_read, root, copies)
    found = Revisions(
        tuple(each(lambda key: read(key, Rerun), reruns.values(), _READERS)),
        tuple(each(lambda key: read(key, Choice), choices.values(), _READERS)),
    )
    lost = (_needed(run, found, reruns, choices) | copies.keys()) - {*reruns.values(), *choices.values()}
    if lost:
        back = [f"{copies[key][0]} to {key}" for key in sorted(lost) if key in copies]
        raise WrongRecord(
            f"{root.url}/{layout.revision_folder(run)} lacks records: {', '.join(sorted(lost))}, so it is not known "
            f"which revision is the head. {_COPY_BACK.format(', '.join(back)) if back else _RESTORE}"
        )
    for number, record in enumerate(found.reruns, 1):
        if record.revision != number or record.parent >= number:
            raise _impossible(root, layout.rerun_key(run, number), f"revision {record.revision} from {record.parent}")
    for number, record in enumerate(found.choices, 1):
        if record.goes_on > record.revision:
            raise _impossible(root, layout.choice_key(run, number), f"{record.revision} going on as {record.goes_on}")
    return found


def _copies(root: Root, run: str) -> dict[str, list[str]]:
    """The second copies of records, by the key of the record."""
    found: dict[str, list[str]] = {}
    for copy in root.keys(layout.copy_folder(run)):
        if key := layout.copied(copy):
            found.setdefault(key, []).append(copy)
    return found


def _read[M: BaseModel](root: Root, copies: Mapping[str, list[str]], key: str, kind: type[M]) -> M:
    where, data = f"{root.url}/{key}", root.read_bytes(key)
    record = records.parse(records.unseal(data, where, key), kind, where)
    if key in copies and layout.copy_key(key, bytes_digest(data)) not in copies[key]:
        raise WrongRecord(f"{where} is not what was written. {_COPY_BACK.format(f'{copies[key][0]} to {key}')}")
    return record


def _needed(run: str, found: Revisions, reruns: Iterable[int], choices: Iterable[int]) -> set[str]:
    """Keys of the records that must be there, because others of the run name them or follow them."""
    last = max([*reruns, *(one.revision for one in found.choices)], default=0)
    made = max([*choices, *(one.choices for one in found.reruns)], default=0)
    numbered = {layout.rerun_key: last, layout.choice_key: made}
    return {key_of(run, number) for key_of, end in numbered.items() for number in range(1, end + 1)}


def _impossible(root: Root, key: str, what: str) -> WrongRecord:
    return WrongRecord(f"{root.url}/{key} says {what}: no process writes that. {_RESTORE}")


def record_rerun(root: Root, run: str, rerun: Rerun) -> bool:
    return _record(root, run, layout.rerun_key(run, rerun.revision), rerun)


def record_choice(root: Root, run: str, choice: Choice, number: int) -> bool:
    """Publish a choice as the `number`-th of the run, unless that is taken."""
    return _record(root, run, layout.choice_key(run, number), choice)


def _record(root: Root, run: str, key: str, record: BaseModel) -> bool:
    written = records.publish(root, key, record)
    keep_copies(root, run)
    return written


def keep_copies(root: Root, run: str) -> None:
    """Write the second copies that a process was killed before it wrote. Raises DigestMismatch or WrongRecord if a
    record that has none is damaged, or was copied there."""
    for key in uncopied(root, run):
        data = root.read_bytes(key)
        records.unseal(data, f"{root.url}/{key}", key)
        root.put_if_absent(layout.copy_key(key, bytes_digest(data)), data)


def uncopied(root: Root, run: str) -> list[str]:
    """Keys of the records that have no second copy."""
    reruns, choices = layout.revision_numbers(root.keys(layout.revision_folder(run)))
    copies = _copies(root, run)
    return [key for key in (*reruns.values(), *choices.values()) if key not in copies]
