"""Sampling many batches on several engines at once. Each engine holds enough work that it never waits for the next
batch. A batch goes to the engine that has least in flight, and goes on at another one if its engine is lost."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

import pyarrow as pa

from storage.errors import SyncMismatch, WorkerLost
from tasks.engine.protocol import COMPLETIONS, NOTHING, Begun, Collected, Every, Increment, Sampling, TokenIds
from tasks.workers.interface import EngineHandle

logger = logging.getLogger(__name__)

WAIT_S = 0.5
"""Seconds that one call waits for an engine to finish a batch: progress is known that often."""


@dataclass(frozen=True)
class Batch:
    """Prompts to sample together, each with a seed and the beginning of its response, if there is any."""

    prompts: Sequence[TokenIds]
    seeds: Sequence[int]
    begun: Sequence[Begun] = ()
    name: str = ""  # as `EngineProtocol.enqueue`
    max_tokens: int | None = None  # limit on response tokens, if it is not that of the others


@dataclass(frozen=True)
class Growing:
    """Responses that are to be told while they grow."""

    every: Every
    grown: Callable[[int, Sequence[Increment]], None]
    """Called with the number of a batch and its increments, as `ready`."""


def sample(
    engines: Sequence[EngineHandle],
    batches: Sequence[Batch],
    how: Sampling,
    ready: Callable[[int, pa.RecordBatch], None],
    ahead: int = 1024,
    told: Callable[[int], None] = lambda _done: None,
    version: int | None = None,
    growing: Growing | None = None,
) -> None:
    """Sample all batches, in any order, with weights of `version`, or any by default. `ready` is called with the number
    of each batch and its completions (schema `COMPLETIONS`) as soon as they are there, in the caller's context, from
    one thread for each engine; `told` with the number of finished samples, a few times a second at most. An engine gets
    no further batch while it has `ahead` samples in flight. By default responses are told when their batch is finished.
    Raises WorkerLost (no engine is left; while there is one, it goes on with what the lost ones had), SyncMismatch (as
    `EngineProtocol.generate`; or other weights sampled a batch) or InputError (as `EngineProtocol.generate`)."""
    work = _Shared(engines, batches, how, ready, ahead, told, version, growing)
    if not batches:
        return
    if len(engines) == 1:
        work.serve(0)
        return
    with ThreadPoolExecutor(len(engines)) as pool:
        served = [pool.submit(copy_context().run, work.serve, place) for place in range(len(engines))]
        try:
            for one in served:
                one.result()
        finally:
            work.stop()


def spread(engines: Sequence[EngineHandle], batch: Batch, how: Sampling, version: int | None = None) -> pa.Table:
    """One batch, an equal share on each engine; its completions (schema `COMPLETIONS`) in order. Raises as `sample`."""
    size = max(1, math.ceil(len(batch.prompts) / len(engines)))
    shares = [slice(first, first + size) for first in range(0, len(batch.prompts), size)]
    found: dict[int, pa.RecordBatch] = {}
    batches = [Batch(batch.prompts[share], batch.seeds[share]) for share in shares]
    sample(engines, batches, how, found.__setitem__, version=version)
    completions = [found[number].select(COMPLETIONS.names) for number in range(len(shares))]
    return pa.Table.from_batches(completions, COMPLETIONS)


@dataclass
class _Shared:
    """State that the threads of the engines share."""

    _engines: Sequence[EngineHandle]
    _batches: Sequence[Batch]
    _how: Sampling
    _ready: Callable[[int, pa.RecordBatch], None]
    _ahead: int
    _told: Callable[[int], None]
    _version: int | None
    _growing: Growing | None

    def __post_init__(self) -> None:
        places = range(len(self._engines))
        self._begun = [list(one.begun) or [NOTHING] * len(one.prompts) for one in self._batches]
        self._changed = threading.Condition()
        self._waiting = deque(range(len(self._batches)))
        self._given: dict[int, set[int]] = {place: set() for place in places}  # of engines that live
        self._queued: dict[int, set[int]] = {place: set() for place in places}
        self._partial = dict.fromkeys(places, 0)  # samples of batches that are not finished
        self._done = 0  # samples of finished batches
        self._left = len(self._batches)
        self._stopped = False

    def serve(self, place: int) -> None:
        """Keep one engine at work until everything is done, or it is lost and another remains."""
        engine = self._engines[place]
        try:
            engine.drop()  # what an earlier caller, or an attempt that failed, has left
            while (numbers := self._next(place)) is not None:
                for number in numbers:
                    self._enqueue(number, engine)
                self._collect(place, engine)
        except WorkerLost as loss:
            if not self._lose(place):
                raise
            logger.warning("%s; the other engines take over its samples", loss)
        except BaseException:
            self.stop()
            raise

    def _enqueue(self, number: int, engine: EngineHandle) -> None:
        batch, every = self._batches[number], None if self._growing is None else self._growing.every
        begun = self._begun[number] if any(len(one.tokens) for one in self._begun[number]) else ()
        how = self._how.model_copy(update={} if batch.max_tokens is None else {"max_tokens": batch.max_tokens})
        engine.enqueue(number, batch.prompts, batch.seeds, how, begun, every, batch.name)

    def stop(self) -> None:
        """Let every thread end once the call that it waits for has returned."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _next(self, place: int) -> list[int] | None:
        """Batches to queue at an engine now; None once it has nothing more to do."""
        with self._changed:
            while self._left and not self._stopped:
                self._deal()
                if self._given[place]:
                    new = sorted(self._given[place] - self._queued[place])
                    self._queued[place].update(new)
                    return new
                self._changed.wait()  # an engine may be lost, and what it had is dealt again
            return None

    def _deal(self) -> None:
        while self._waiting:
            place = min(self._given, key=self._in_flight)
            if self._in_flight(place) >= self._ahead:
                return
            self._given[place].add(self._waiting.popleft())
            self._changed.notify_all()

    def _in_flight(self, place: int) -> int:
        return sum(len(self._batches[number].prompts) for number in self._given[place])

    def _collect(self, place: int, engine: EngineHandle) -> None:
        collected = engine.collect(WAIT_S)
        self._grow(collected)
        for batch in collected.finished:
            check_version(batch.weight_version, self._version)
            self._ready(batch.number, batch.completions)
        with self._changed:
            finished = {batch.number for batch in collected.finished}
            samples = sum(len(self._batches[number].prompts) for number in finished)
            self._given[place] -= finished
            self._partial[place] += collected.samples - samples
            self._done += samples
            self._left -= len(finished)
            self._told(self._done + sum(self._partial.values()))
            self._changed.notify_all()

    def _grow(self, collected: Collected) -> None:
        """Note the growth of responses, and tell it by batch unless the batch is finished by now."""
        told: dict[int, list[Increment]] = {}
        for one in collected.increments:
            check_version(one.weight_version, self._version)
            rows = self._begun[one.number]
            rows[one.row] = rows[one.row].grown(one.grown)
            told.setdefault(one.number, []).append(one)
        for number in told.keys() - {batch.number for batch in collected.finished}:
            if self._growing is not None:
                self._growing.grown(number, told[number])

    def _lose(self, place: int) -> bool:
        """Take back what a lost engine had; whether another engine remains."""
        with self._changed:
            self._waiting.extendleft(sorted(self._given.pop(place), reverse=True))
            self._partial.pop(place)
            self._stopped = self._stopped or not self._given
            self._changed.notify_all()
            return bool(self._given)


def check_version(sampled: int | None, wanted: int | None) -> None:
    """Check that an engine has sampled with the weights of version `wanted`; None allows any. Raises SyncMismatch."""
    if wanted not in (None, sampled):
        raise SyncMismatch(
            f"an engine has sampled with weights of version {sampled}, but those of version "
            f"{wanted} were asked for; the samples are not used. Run again, which syncs the weights again"
        )
