"""Sampling of single answers by the engines of a run, many conversations at once.

Each request is a batch of its own, so an engine answers whichever is ready, and a conversation that waits for its tool
stops no other one. The requests of a seed go to the engine that has its earlier turns in the prefix cache.
"""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Protocol, Self

from storage.errors import InputError, WorkerLost
from tasks.engine.protocol import Collected, EngineProtocol, Finished, Sampling, TokenIds
from tasks.environments.trajectory import Answer
from tasks.workers.interface import EngineHandle
from tasks.workers.sampling import check_version

_WAIT_S = 0.05  # seconds of one call, and so the longest time for which a new request waits for a step


class Sampler(Protocol):
    """Answers of a policy."""

    async def sample(self, prompt: TokenIds, seed: int, sampling: Sampling) -> Answer:
        """An answer after the tokens of `prompt`. Its noise follows from the seed and the position of each token alone,
        so all turns of a trajectory have one seed. Raises InputError (the prompt is empty or leaves no room),
        WorkerLost (no engine is left) or SyncMismatch (the weights are not those that must sample)."""
        ...


@dataclass(eq=False)
class _Request:
    prompt: TokenIds
    seed: int
    sampling: Sampling
    answer: asyncio.Future[Answer]

    def resolve(self, found: Answer | BaseException) -> None:
        """Called from any thread."""
        self.answer.get_loop().call_soon_threadsafe(self._set, found)

    def _set(self, found: Answer | BaseException) -> None:
        if self.answer.done():  # nobody waits for it any more
            return
        if isinstance(found, BaseException):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


@dataclass
class _Lane:
    engine: EngineHandle
    inbox: list[_Request] = field(default_factory=list)
    flying: dict[int, _Request] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return len(self.inbox) + len(self.flying)


class EngineSampler(Sampler):
    """As a context manager: at its end the engines are asked no more."""

    def __init__(self, engines: Sequence[EngineHandle], version: int | None = None) -> None:
        """`version` is that of the weights that must sample; any by default."""
        self._lanes, self._version = [_Lane(engine) for engine in engines], version
        self._of_seed: dict[int, _Lane] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(len(engines))
        self._closed = False

    def __enter__(self) -> Self:
        for lane in list(self._lanes):
            self._pool.submit(copy_context().run, self._serve, lane)
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown()

    async def sample(self, prompt: TokenIds, seed: int, sampling: Sampling) -> Answer:
        """`Sampler.sample`."""
        request = _Request(prompt, seed, sampling, asyncio.get_running_loop().create_future())
        with self._changed:
            self._give(request)
        return await request.answer

    def _give(self, request: _Request) -> None:
        if self._failure is not None:
            raise self._failure
        lane = self._of_seed.get(request.seed)
        if lane not in self._lanes:
            lane = self._of_seed[request.seed] = min(self._lanes, key=lambda one: one.load)
        lane.inbox.append(request)
        self._changed.notify_all()

    def _serve(self, lane: _Lane) -> None:
        try:
            lane.engine.drop()  # what an earlier caller, or an attempt that failed, has left
            while (new := self._next(lane)) is not None:
                self._enqueue(lane, new)
                self._resolve(lane, lane.engine.collect(_WAIT_S))
        except BaseException as error:
            self._lose(lane, error)
            raise

    def _next(self, lane: _Lane) -> list[_Request] | None:
        with self._changed:
            while not (lane.load or self._closed):
                self._changed.wait()
            new, lane.inbox = lane.inbox, []
            return None if self._closed else new

    def _enqueue(self, lane: _Lane, new: Sequence[_Request]) -> None:
        """Send all requests before the answer to the first is waited for."""
        numbered = dict(zip(self._numbers, new, strict=False))
        lane.flying |= numbered
        sent = {
            number: lane.engine.submit(EngineProtocol.enqueue, number, [one.prompt], [one.seed], one.sampling)
            for number, one in numbered.items()
        }
        for number, pending in sent.items():
            try:
                lane.engine.results(pending)
            except InputError as error:
                lane.flying.pop(number).resolve(error)

    def _resolve(self, lane: _Lane, collected: Collected) -> None:
        for batch in collected.finished:
            check_version(batch.weight_version, self._version)
            lane.flying.pop(batch.number).resolve(_answer(batch))

    def _lose(self, lane: _Lane, error: BaseException) -> None:
        """Give what a lost engine had to the others, or fail everything."""
        with self._changed:
            self._lanes.remove(lane)
            left = [*lane.flying.values(), *lane.inbox]
            if isinstance(error, WorkerLost) and self._lanes:
                for request in left:
                    self._give(request)
                return
            self._failure = error
            for request in (*left, *(one for other in self._lanes for one in (*other.flying.values(), *other.inbox))):
                request.resolve(error)


def _answer(batch: Finished) -> Answer:
    tokens, logprobs = (batch.completions.column(at)[0].values.to_numpy() for at in (0, 1))  # of the one request
    return Answer(tokens, logprobs, batch.completions.column(2)[0].as_py(), batch.weight_version, batch.cached)
