"""Requests that sample one token in each step, as columns of NumPy arrays: a few operations a step for all of them."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.engine.ends import END, Ends

Places = NDArray[np.intp]  # indices of rows

_COLUMNS = 11
SERIAL, SLOT, LINE, COMPUTED, SAMPLED, FLYING, STEPS, LIMIT, ROOM, DUE, DUE_AT = range(_COLUMNS)
"""Numbers of a row: its serial number, in order of entry; its line of the buffers; its line of the table of ends; its
tokens whose keys and values the steps planned so far compute; tokens sampled; tokens that planned steps will sample;
steps among these that were planned while it was a row; most tokens that it samples; tokens that its blocks hold;
sampled tokens, and ms of the steady clock, at which its new tokens are due."""


class Entry(NamedTuple):
    name: str  # its id
    request: Any  # the scheduler's object for it
    line: int  # see `LINE`
    computed: int  # see `COMPUTED`
    sampled: int  # see `SAMPLED`
    flying: int  # see `FLYING`
    limit: int  # see `LIMIT`
    due: int  # see `DUE`
    due_at: int  # see `DUE_AT`


class Left(NamedTuple):
    """A request as it leaves the rows."""

    request: Any  # the scheduler's object for it
    tokens: NDArray[np.int32]  # tokens sampled as a row
    logprobs: NDArray[np.float32]  # one for each of them
    computed: int  # see `COMPUTED`
    flying: int  # see `FLYING`
    steps: int  # see `STEPS`
    line: int  # see `LINE`


class Planned(NamedTuple):
    """The rows of a step, in the order in which the step computes them."""

    number: int  # the same for steps of the same rows
    serials: NDArray[np.int64]  # their `SERIAL`
    scheduled: dict[str, int]  # 1 for the id of each; shared by the steps, never changed


class Rows:
    """Requests in order of entry."""

    def __init__(self, capacity: int, longest: int, ends: Ends) -> None:
        """At most `capacity` rows of at most `longest` tokens."""
        # the system gives a page of these when it is first written
        self._tokens = np.zeros((capacity, longest), dtype=np.int32)
        self._logprobs = np.zeros((capacity, longest), dtype=np.float32)
        self._first = np.zeros(capacity, dtype=np.int64)  # tokens that a request had when it entered, by slot
        self._free = list(range(capacity))
        self._ends = ends
        self._serial = 0
        self._number = 0
        self._planned: Planned | None = None
        self._serials: dict[str, int] = {}
        self.requests: list[Any] = []
        self.table = np.zeros((_COLUMNS, 0), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, name: str) -> bool:
        return name in self._serials

    def enter(self, entries: Iterable[Entry]) -> None:
        """Append requests."""
        columns = [self._column(entry) for entry in entries]
        if columns:
            self.table = np.concatenate([self.table, np.array(columns, dtype=np.int64).T], axis=1)
            self._planned = None

    def plan(self) -> Planned:
        """The rows of the next step: all but those whose last token an earlier step samples."""
        due = self.table[SAMPLED] + self.table[FLYING] < self.table[LIMIT]
        everyone = bool(due.all())
        if everyone and self._planned is not None:
            return self._planned
        self._number += 1
        names = list(self._serials) if everyone else _chosen(list(self._serials), due)
        planned = Planned(self._number, self.table[SERIAL][due], dict.fromkeys(names, 1))
        self._planned = planned if everyone else None
        return planned

    def places(self, serials: NDArray[np.int64]) -> tuple[Places, Places]:
        """Those of `serials` that are still rows: their places, and their indices in `serials`."""
        own = self.table[SERIAL]
        if len(own) == len(serials) and np.array_equal(own, serials):
            every = np.arange(len(own))
            return every, every
        found = np.searchsorted(own, serials)  # serials ascend
        there = np.append(own, -1)[found] == serials
        return found[there], np.flatnonzero(there)

    def places_of(self, names: Iterable[str]) -> Places:
        serials = np.fromiter(map(self._serials.__getitem__, names), dtype=np.int64)
        return np.searchsorted(self.table[SERIAL], serials)

    def advance(self, planned: Planned) -> None:
        """A step over these rows was planned."""
        at, _ = self.places(planned.serials)
        for column in (COMPUTED, FLYING, STEPS):
            self.table[column, at] += 1

    def take(self, at: Places, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], as_rows: int) -> Places:
        """Note what a step sampled for the rows `at`; the places among them that end with it. The first `as_rows` of
        `at` were rows when the step was planned."""
        slots, sampled = self.table[SLOT, at], self.table[SAMPLED, at]
        columns = sampled - self._first[slots]
        self._tokens[slots, columns], self._logprobs[slots, columns] = tokens, logprobs
        self.table[SAMPLED, at] += 1
        self.table[FLYING, at] -= 1
        self.table[STEPS, at[:as_rows]] -= 1
        lines = self.table[LINE, at] = self._ends.table[self.table[LINE, at], tokens]
        return at[(lines == END) | (sampled + 1 >= self.table[LIMIT, at])]

    def due(self, at: Places, now: int) -> Places:
        """Those of the rows `at` whose new tokens are due at the time `now`, in ms."""
        return at[(self.table[SAMPLED, at] >= self.table[DUE, at]) | (self.table[DUE_AT, at] <= now)]

    def sampled(self, place: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Tokens that a row has sampled, and their log-probabilities, (T,) each, as views."""
        slot = self.table[SLOT, place]
        count = self.table[SAMPLED, place] - self._first[slot]
        return self._tokens[slot, :count], self._logprobs[slot, :count]

    def stopped(self, at: Places) -> list[bool]:
        """Mask of the rows whose last token ends them."""
        return (self.table[LINE, at] == END).tolist()

    def leave(self, at: Places) -> list[Left]:
        """Remove rows, and give back what happened to their requests."""
        left = [self._left(place) for place in at.tolist()]
        stay = np.ones(len(self), dtype=bool)
        stay[at] = False
        self._free += self.table[SLOT, at].tolist()
        for one in left:
            del self._serials[one.request.request_id]
        self.requests = _chosen(self.requests, stay)
        self.table = self.table[:, stay]
        self._planned = None
        return left

    def _column(self, entry: Entry) -> list[int]:
        slot = self._free.pop()
        self._first[slot] = entry.sampled
        self._serial += 1
        self._serials[entry.name] = self._serial
        self.requests.append(entry.request)
        before, limits = (entry.computed, entry.sampled, entry.flying, 0), (entry.limit, entry.computed)
        return [self._serial, slot, entry.line, *before, *limits, entry.due, entry.due_at]

    def _left(self, place: int) -> Left:
        tokens, logprobs = self.sampled(place)
        line, computed, flying, steps = self.table[[LINE, COMPUTED, FLYING, STEPS], place].tolist()
        return Left(self.requests[place], tokens.copy(), logprobs.copy(), computed, flying, steps, line)


def _chosen(values: list[Any], mask: NDArray[np.bool_]) -> list[Any]:
    return [values[place] for place in np.flatnonzero(mask).tolist()]
