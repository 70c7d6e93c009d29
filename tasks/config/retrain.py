"""Training again on samples that are stored: which state to start from, which samples, how often."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field

from storage.backends.root import absolute_url
from storage.errors import InputError
from storage.ids import check_run_name
from tasks.config.section import Section, public

_SPAN = re.compile(r"(?P<run>[^@]+)(?:@(?P<first>\d+)(?:(?P<open>-)(?P<last>\d*))?)?")
_AGE = re.compile(r"(?P<number>\d+)(?P<unit>[mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True)
class Place:
    """Iterations of a run, of this root or of another one."""

    root: str | None  # URL of its root; None is the root of the run that names it
    run: str
    first: int
    last: int | None  # None is the newest there is


def place_of(text: str) -> Place:
    """Parse `[ROOT//]RUN[@FROM[-[TO]]]`, as in `demo`, `demo@7`, `demo@3-9`, `demo@3-` and
    `s3://bucket/runs//demo@3-9`. Raises InputError: it has another form."""
    root, slashes, rest = text.rpartition("//")
    if (found := _SPAN.fullmatch(rest)) is None or (slashes and (not root or root.endswith(":"))):
        raise InputError(f"{text!r} is not of the form [ROOT//]RUN[@FROM-TO], as in demo@3-9 or s3://b/runs//demo")
    first = int(found["first"]) if found["first"] else 1
    last = None if not found["first"] or (found["open"] and not found["last"]) else int(found["last"] or first)
    if last is not None and last < first:
        raise InputError(f"{text!r} ends before it begins: write RUN@{last}-{first}")
    return Place(root or None, check_run_name(found["run"]), first, last)


def absolute(text: str) -> str:
    """A place with the absolute URL of its root, if it names one. Raises InputError: it has another form."""
    place, (root, _, rest) = place_of(text), text.rpartition("//")
    return text if place.root is None else f"{absolute_url(root)}//{rest}"


def state_of(text: str) -> Place:
    """Parse `[ROOT//]RUN@ITERATION`, which names one train state. Raises InputError: it has another form."""
    place = place_of(text)
    if place.last is None or place.first != place.last:
        raise InputError(f"{text!r} does not name one state: give RUN@ITERATION, or ROOT//RUN@ITERATION")
    return place


def moment_before(age: str, now: datetime) -> datetime:
    """The time `age` (90m, 24h, 7d, 2w) before `now`, in UTC and whole seconds. Raises InputError: another form."""
    if (found := _AGE.fullmatch(age)) is None:
        raise InputError(f"--newer-than {age!r} is not an age: give a number with m, h, d or w, as in 24h or 7d")
    try:
        before = now.astimezone(UTC) - timedelta(**{_UNITS[found["unit"]]: int(found["number"])})
    except OverflowError:
        raise InputError(f"--newer-than {age!r} is before the year 1: give a smaller age") from None
    return before.replace(microsecond=0)


class RetrainSection(Section):
    """A run that trains on stored samples and samples none: `ratchet retrain` writes this table."""

    start: Annotated[str, AfterValidator(lambda text: _usable(text, state_of))]
    """The state to start from, as [ROOT//]RUN@ITERATION. Its model and prompts become the run's own. A relative ROOT is
    recorded as the absolute path that it is when the run begins, here and in `select`."""
    select: tuple[Annotated[str, AfterValidator(lambda text: _usable(text, place_of))], ...] = Field(min_length=1)
    """Runs whose samples are taken, each as [ROOT//]RUN[@FROM-TO]; without a root it is the run's own root."""
    where: str = ""
    """Condition over the columns of samples and scores, as in reward > 0 and oldest_version >= 12; empty takes all."""
    since: Annotated[datetime, AfterValidator(lambda time: _in_utc(time))] | None = None
    """Only samples that were committed at this time or later (UTC)."""
    revisions: Literal["head", "all"] = "head"
    """Of a rollout that was done again: the samples that count in its run, or those of every revision."""
    deduplicate: bool = False
    """Take the first of several samples with equal prompt tokens and response tokens."""
    limit: int | None = Field(default=None, ge=1)
    """Most samples, counted in the order of `select`; whole prompt groups."""
    rescore: bool = False
    """Score the selected samples again with [reward], in place of the scores that they have."""
    samples: int = Field(default=256, ge=1)
    """Samples of an iteration: as many whole prompt groups as reach this number."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the selected samples."""
    shuffle: bool = True
    """Take the iterations' shares of samples in another order in each epoch."""

    def iterations(self, shares: int) -> int:
        """Iterations of a run whose selection has so many shares."""
        return self.epochs * shares

    def share(self, iteration: int, shares: int, seed: int) -> int:
        """Number of the share that an iteration, counted from 1, trains on: each once in an epoch."""
        epoch, place = divmod(iteration - 1, shares)
        return int(np.random.default_rng([seed, epoch]).permutation(shares)[place]) if self.shuffle else place


def _in_utc(since: datetime) -> datetime:
    if since.tzinfo is None:
        raise ValueError(f"since {since} has no time zone: write it with one, as in 2026-11-22T00:00:00Z")
    return since.astimezone(UTC)


def _usable(text: str, parse: Callable[[str], Place]) -> str:
    try:
        parse(public(text))
        return absolute(text)
    except InputError as error:
        raise ValueError(str(error)) from None
