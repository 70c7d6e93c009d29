"""Conversations that a user's function drives through a client: `drive(base_url, api_key, record, seed) -> reward`.

The function and its client run in a process of their own. Each answer is durable before the client has it, so a
function that runs again, after a failure or a kill, is given the same answers and goes on after them."""

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from storage.unfinished import TurnEvent
from tasks.config.reward import EnvironmentSection
from tasks.data.tokenizer import TextCodec
from tasks.endpoint.server import Endpoint, Rules, serving
from tasks.endpoint.sessions import Branch, Session
from tasks.engine.protocol import Sampling, TokenIds
from tasks.environments.calls import Reader
from tasks.environments.conversation import (
    Limits,
    Note,
    Played,
    Task,
    answer_of,
    called_with,
    course_of,
    failed_with,
    since,
)
from tasks.environments.hosting import EnvironmentFailed, Host
from tasks.environments.rendering import Renderer
from tasks.environments.sampler import Sampler
from tasks.environments.scores import Branched, Kept, PlayedScore
from tasks.environments.trajectory import Answer, Trajectory

_LATER_S = 0.1
_FOREVER_S = 1e8


class RecordedSampler(Sampler):
    """A sampler whose answers are kept: to the same question it gives the same answer without asking."""

    def __init__(self, sampler: Sampler, past: Sequence[TurnEvent], note: Note) -> None:
        """`note` runs on the loop that makes this object, `sample` on any."""
        self._sampler, self._note, self._loop = sampler, note, asyncio.get_running_loop()
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        """The error by which an answer could not be kept, once there is one."""
        self._known = {event.detail: answer_of(event) for event in past if event.kind == "called"}

    async def sample(self, prompt: TokenIds, seed: int, sampling: Sampling) -> Answer:
        """`Sampler.sample`."""
        question = f"{seed}/{sampling.model_dump_json()}/".encode() + np.asarray(prompt, np.int32).tobytes()
        place = hashlib.blake2b(question, digest_size=16).hexdigest()
        if place not in self._known:
            answer = await self._sampler.sample(prompt, seed, sampling)
            if answer.finish_reason == "abort":  # it is none, and is asked for again
                return answer
            event = called_with(answer, detail=place)
            kept = asyncio.run_coroutine_threadsafe(self._noted(event), self._loop)
            await asyncio.shield(asyncio.wrap_future(kept))  # others are stored with it
            self._known[place] = answer
        return self._known[place]

    async def _noted(self, event: TurnEvent) -> None:
        try:
            await self._note(event)
        except BaseException as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise


@dataclass(frozen=True)
class Driver:
    """Plays conversations as `Player` does, by a function that speaks first."""

    host: Host
    sampler: Sampler
    endpoint: Endpoint
    url: str
    limits: Limits

    async def play(self, task: Task, past: Sequence[TurnEvent], note: Note) -> Played:
        """A conversation; arguments, failures and raises as `Player.play`. Of several branches its row is that of the
        last answer, whose first turn tells of the others, and of what a client asked in vain; they are kept beside."""
        sampler, failures = RecordedSampler(self.sampler, past, note), [one for one in past if one.kind == "failed"]
        while len(failures) <= self.limits.retries:
            clock = time.monotonic()
            session = self.endpoint.open(task.seed, self.limits.turns, self.limits.tokens or 1 << 30, sampler)
            try:
                try:
                    reward = await self._driven(task, session, sampler)
                finally:  # it raises if the engines have failed: that is not a failure of the function
                    await self.endpoint.close(session)
            except EnvironmentFailed as failure:
                event = failed_with(failure, seconds=since(clock) - session.sampling_s)
            else:
                row, took = _row(session), session.sampling_s
                score = PlayedScore(rewards=(*[None] * (row.answers - 1), reward))
                course = course_of(row, failures, environment_s=(since(clock) - took,), sampling_s=took)
                return Played(row, Kept(score=score, course=course, branches=_others(session)))
            failures.append(event)
            await note(event)
        row = Trajectory(task.prompt)
        course = course_of(row, failures, environment_s=(), sampling_s=0.0)
        return Played(row, Kept(score=PlayedScore(rewards=(), failure=course.failures[-1]), course=course))

    async def _driven(self, task: Task, session: Session, sampler: RecordedSampler) -> float:
        """The reward. Raises EnvironmentFailed: the function has failed, or takes too long beside the engines."""
        async with await self.host.open() as opened:
            asked = {"url": self.url, "key": session.key, "record": dict(task.record), "seed": task.world}
            driven = asyncio.ensure_future(opened.ask(_FOREVER_S, f"the drive of {task}", **asked))
            begun = time.monotonic()
            try:
                while not driven.done():
                    left = self._left(task, time.monotonic() - begun - session.sampling_s)
                    wakes = {driven, sampler.failure}
                    await asyncio.wait(wakes, timeout=left + _LATER_S, return_when=asyncio.FIRST_COMPLETED)
                    if sampler.failure.done():
                        raise sampler.failure.result()
                reward = float((await driven)["reward"])
            except EnvironmentFailed as failure:
                if failure.reason != "exception" or not session.at_limit:
                    raise
                reward = 0.0  # it could not go on, as the policy was at its limits
            finally:
                driven.cancel()
        if session.last is None:
            raise EnvironmentFailed("exception", f"the drive of {task} has asked the policy nothing")
        return reward

    def _left(self, task: Task, spent: float) -> float:
        """Seconds after which its time may be over: later if the engines have a part in them."""
        if spent > self.limits.seconds:
            late = f"the drive of {task} took more than {self.limits.seconds:g} s beside the engines"
            raise EnvironmentFailed("timeout", late)
        return self.limits.seconds - spent


@contextmanager
def driving(
    section: EnvironmentSection,
    host: Host,
    sampler: Sampler,
    sampling: Sampling,
    codec: TextCodec,
    limits: Limits,
    reader: Reader,
) -> Iterator[Driver]:
    """The endpoint of a rollout, and what plays through it."""
    rules = Rules(section.model, sampling, limits.context, section.sampling)
    endpoint = Endpoint(sampler, Renderer(codec, most=limits.context), rules, reader)
    with serving(endpoint) as url:
        yield Driver(host, sampler, endpoint, url, limits)


def _row(session: Session) -> Trajectory:
    assert session.last is not None
    told = {
        "others": [{"why": one.why, "parent": one.parent, "answers": one.row.answers} for one in session.others],
        "overridden": session.overridden,
        "refused": session.refused,
    }
    return _marked(session.last, **told)


def _others(session: Session) -> tuple[Branched, ...]:
    """The branches beside the row, in an order that does not follow from that of requests at once."""
    others = sorted(session.others, key=lambda one: (len(one.row.prompt), one.row.turns[0]["end"], one.seed))
    rows = [_marked(one).columns() for one in others]
    return tuple(
        Branched(turns=tuple(row.pop("turns")), **{name: tuple(value.tolist()) for name, value in row.items()})
        for row in rows
    )


def _marked(branch: Branch, **more: Any) -> Trajectory:
    """The tokens of a branch, with a turn before them that tells why it began."""
    told = {"branch": {"why": branch.why, "parent": branch.parent, "seed": branch.seed}, **more}
    branch.row.turns.insert(0, {"role": "environment", "begin": 0, "end": 0, "results": json.dumps(told)})
    return branch.row
