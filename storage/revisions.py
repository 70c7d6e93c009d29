"""Which revision of each stage belongs to a run, once finished stages were done again.

Revision 0 of a run is what was done first. Doing a finished stage again makes the next revision, which begins as a copy
by reference of the one it was asked in (its parent): that stage, and what is made from it, have manifests of their own
under the new number; all else is the parent's. So each revision is one chain of manifests that are made from each
other. The head is the revision that the last choice names: one log, put-if-absent, so there is never more than one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import BaseModel, ConfigDict, JsonValue, NonNegativeInt, PositiveInt

from storage import layout, records
from storage.backends.root import Root
from storage.errors import InputError, SchemaMismatch
from storage.ids import StageName
from storage.parallel import each

_READERS = 8


class Rerun(BaseModel):
    """Record that a finished stage is to be done again. Written first: whoever drives the run next finishes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = 1
    """Version of this record's own format."""
    revision: PositiveInt
    """Number of the revision that it makes, which is also its own."""
    parent: NonNegativeInt
    """The revision that it was asked in: the head at that time."""
    iteration: NonNegativeInt
    stage: StageName
    """What is done again."""
    behind: tuple[StageName, ...] = ()
    """Stages of the same iteration that are made from it."""
    later: bool = True
    """Whether the iterations that follow are made from it."""
    cascade: bool
    """Whether the result becomes the head, so that what is made from it is done again too."""
    new_seeds: bool = False
    """Whether samples are drawn with other seeds than the first time."""
    settings: dict[str, JsonValue] = {}
    """Settings that decide results and differ from those of the parent, by `section.key`."""
    until: NonNegativeInt
    """Last complete iteration when it was asked: that far a cascade goes."""
    choices: NonNegativeInt
    """How many choices of a head were made before."""
    reason: str
    """Why, in the words of who asked."""
    asked_by: str
    """User and host, or the flow run."""
    request: str | None = None
    """Identity of the request: asked again under the same identity, it is the same rerun."""
    time: datetime
    """When (UTC)."""

    def __str__(self) -> str:
        return f"{self.stage}@{self.iteration}"

    def is_behind(self, iteration: int, stage: str) -> bool:
        """Whether a stage is made from the one that is done again."""
        return (self.later and iteration > self.iteration) or (iteration == self.iteration and stage in self.behind)


class Choice(BaseModel):
    """Record that a revision became the head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = 1
    """Version of this record's own format."""
    revision: NonNegativeInt
    """The head from now on."""
    goes_on: NonNegativeInt
    """The revision that has what is behind the repeated stage: an earlier one if the stage came to the same digest as
    there, so that nothing behind it is done again; otherwise `revision` itself."""
    reason: str
    """Why, in the words of who asked."""
    asked_by: str
    """User and host, or the flow run."""
    time: datetime
    """When (UTC)."""


@dataclass(frozen=True)
class Revisions:
    """All revisions of a run, seen from one of them: by default the head."""

    reruns: tuple[Rerun, ...] = ()
    """In the order of their numbers, from 1."""
    choices: tuple[Choice, ...] = ()
    """In the order of time."""
    seen_from: int | None = None
    """The revision that questions are answered for; None for the head."""

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
        """All revisions."""
        return range(len(self.reruns) + 1)

    def rerun(self, number: int) -> Rerun:
        """What makes revision `number`, which is not 0."""
        return self.reruns[number - 1]

    def seen(self, number: int) -> "Revisions":
        """The same revisions, seen from `number`.

        Raises:
            InputError: there is no such revision.
        """
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
        return next((choice.goes_on for choice in self.choices if choice.revision == number), number)

    @property
    def pending(self) -> Rerun | None:
        """The last rerun, unless its result or another revision was chosen since; withdrawn if another was."""
        last = self.reruns[-1] if self.reruns else None
        return last if last is not None and last.choices == len(self.choices) else None

    def requested(self, request: str) -> Rerun | None:
        """The rerun that was asked under an identity, if there is one."""
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


FIRST = Revisions()
"""Those of a run of which nothing was done again."""


def read_revisions(root: Root, run: str) -> Revisions:
    """The revisions of a run: one listing, and a request for each record.

    Raises:
        DigestMismatch, SchemaMismatch: a record is damaged, missing or of a later version.
    """
    keys = root.keys(layout.revision_folder(run))
    found = Revisions(_read(root, keys, layout.is_rerun, Rerun), _read(root, keys, layout.is_choice, Choice))
    chosen = max((choice.revision for choice in found.choices), default=0)
    if [one.revision for one in found.reruns] != [*found.numbers][1:] or chosen not in found.numbers:
        raise SchemaMismatch(
            f"{root.url}/{layout.revision_folder(run)} lacks records: there are reruns "
            f"{[one.revision for one in found.reruns]}, and revision {chosen} was chosen. Restore them from a copy"
        )
    return found


def _read[M: BaseModel](root: Root, keys: list[str], wanted: Callable[[str], bool], kind: type[M]) -> tuple[M, ...]:
    return tuple(each(lambda key: records.read(root, key, kind), sorted(filter(wanted, keys)), _READERS))


def record_rerun(root: Root, run: str, rerun: Rerun) -> bool:
    """Publish the intent, unless its number is taken."""
    return records.publish(root, layout.rerun_key(run, rerun.revision), rerun)


def record_choice(root: Root, run: str, choice: Choice, number: int) -> bool:
    """Publish a choice as the `number`-th of the run, unless that is taken."""
    return records.publish(root, layout.choice_key(run, number), choice)
