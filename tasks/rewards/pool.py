"""Scoring in processes of their own, with a deadline for each sample. A signal alarm does not work outside the main
thread, and a function that hangs, exits or crashes in our own process would take the run down. Processes are started
for a stage and end with it: none holds an older version of a file."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from storage.errors import StageFailed
from tasks.config.environment import scoring_environment, without_secrets
from tasks.rewards.resolve import Target, values_of, variables_of
from tasks.rewards.sample import Reason, Sample, Score, failed
from tasks.rewards.words import shortened

_LOOK_S = 0.2
_SLACK_S = 60.0  # a worker keeps the deadline itself; this only ends the wait for one that was stopped
_END_S = 15.0
_CHUNK = 1 << 16
_COMMAND = [sys.executable, "-P", "-m", "tasks.rewards.worker"]  # -P: no file of the working directory hides ours


@dataclass(frozen=True)
class Response:
    record: Mapping[str, Any]
    text: str
    prompt_id: str = ""
    sample_id: int = 0
    iteration: int = 0
    finish_reason: str = ""
    tokens: Sequence[int] | NDArray[Any] = ()
    prompt: Sequence[int] | NDArray[Any] = ()  # its token ids; no function is given them

    @property
    def sample(self) -> Sample:
        """Third argument of a function that takes one."""
        tokens = tuple(np.asarray(self.tokens).tolist())
        return Sample(self.prompt_id, self.sample_id, self.iteration, self.finish_reason, tokens)

    @property
    def whole(self) -> NDArray[np.int32]:
        """Token ids of prompt and response."""
        return np.concatenate([self.prompt, self.tokens]).astype(np.int32)


@dataclass(frozen=True)
class ScoringOrder:
    target: Target
    arguments: Mapping[str, Any]  # as configured: secrets are looked up when a process starts
    weights: Mapping[str, float]
    batch: bool
    deadline_s: float
    start_deadline_s: float

    @property
    def variables(self) -> list[str]:
        """Of the environment: those that the arguments refer to."""
        return list(variables_of(dict(self.arguments)))

    def document(self) -> dict[str, Any]:
        """As a worker reads it."""
        return {
            "target": asdict(self.target),
            "arguments": values_of(self.arguments),
            "secrets": list(values_of({name: f"env:{name}" for name in self.variables}).values()),
            "weights": dict(self.weights),
            "batch": self.batch,
            "start_deadline_s": self.start_deadline_s,
            "lazy": self.target.version is None,  # our own functions import all they need with their modules
        }


class Refused(Exception):
    """The function cannot be used: it is not there, cannot be imported, or cannot be called as it would be."""


class Stopped(Exception):
    """Another thread has ended the scoring."""


class Worker:
    """A scoring process (`tasks.rewards.worker`), used by one thread."""

    def __init__(self, order: ScoringOrder, stop: threading.Event | None = None) -> None:
        self._order, self._stop = order, stop or threading.Event()
        self.source = ""  # digest of the file that the function is from
        self._wants_sample = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):
            self._input.close()  # it kills what it started, and ends
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if self._lost else _END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._output.close()

    def score(self, responses: Sequence[Response]) -> list[Score]:
        """Scores of one response, or of a batch. Raises Refused (the function could not be imported again), or Stopped
        (another thread has ended the scoring)."""
        deadline_s = self._order.deadline_s * len(responses)
        asked = {"records": [dict(one.record) for one in responses], "responses": [one.text for one in responses]}
        if self._wants_sample:
            asked["samples"] = [vars(one.sample) for one in responses]
        line = f"{deadline_s}\t{json.dumps(asked)}\n"
        answer = self._asked(line, deadline_s)
        if self._lost:  # by a signal from outside, or by the function, which then ends it a second time
            answer = self._asked(line, deadline_s)
        if answer["status"] == "refused":
            raise Refused(_clean(answer["detail"]))
        if answer["status"] == "scored":
            return [_safe(Score(**score)) for score in answer["scores"]]
        return [_safe(failed(answer["reason"], answer["detail"]))] * len(responses)

    def _asked(self, line: str, deadline_s: float) -> dict[str, Any]:
        if self._lost:
            self.__exit__()
            self._start()
        self._send(line)
        return self._answer(2 * (deadline_s + self._order.start_deadline_s) + _SLACK_S)  # a late death: again

    def _start(self) -> None:
        self._lost = False
        environment, pipe = scoring_environment(self._order.variables), subprocess.PIPE
        self._process = subprocess.Popen(
            _COMMAND, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True, env=environment
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        try:
            self._send(f"{json.dumps(self._order.document())}\n")
            hello = self._answer(self._order.start_deadline_s + _SLACK_S)
        except BaseException:
            self.__exit__()
            raise
        if hello["status"] != "ready" or self.source not in ("", hello["source"]):
            self.__exit__()
            raise Refused(_clean(hello.get("detail", "its file has changed while the stage was scoring")))
        self.source, self._wants_sample = hello["source"], hello["wants_sample"]

    def _send(self, text: str) -> None:
        data = memoryview(text.encode())
        with suppress(BrokenPipeError):  # its end is noticed where the answer is awaited
            while data:
                data = data[self._input.write(data[:_CHUNK]) or 0 :]

    def _answer(self, patience_s: float) -> dict[str, Any]:
        until = time.monotonic() + patience_s
        received = bytearray()
        poll = select.poll()  # a descriptor may be above what select takes
        poll.register(self._output, select.POLLIN)
        while not received.endswith(b"\n"):  # one line for each that was sent
            if self._stop.is_set():
                raise Stopped
            if time.monotonic() > until:
                return self._gone("timeout", "its scoring process was stopped and did not answer")
            if poll.poll(_LOOK_S * 1000):
                data = os.read(self._output.fileno(), _CHUNK)
                if not data:
                    return self._gone("exit", f"its scoring process ended with code {self._process.wait()}")
                received += data
        try:
            return json.loads(received)
        except ValueError:
            return self._gone("exit", "it wrote to a descriptor of its scoring process")

    def _gone(self, reason: Reason, detail: str) -> dict[str, Any]:
        self._lost = True
        return {"status": "failed", "reason": reason, "detail": detail}


@dataclass(frozen=True)
class Scored:
    """The result of a function for all responses."""

    scores: list[Score | None]  # in order; None where scoring ended before, because too many had failed
    source: str  # digest of the file that the function is from


def score_in_processes(
    order: ScoringOrder, responses: Sequence[Response], processes: int, allowed: int | None = None
) -> Scored:
    """Score all responses, in so many processes at a time; a batch in one. After `allowed` failures no more are scored;
    None scores all. Raises StageFailed: the function cannot be imported, or its file has changed meanwhile."""
    work = _Work(order, responses, allowed)
    count = 1 if order.batch else max(1, min(processes, len(responses)))
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(work.carry_out) for _ in range(count)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        except Refused as reason:
            raise _unusable(order, reason) from None
        finally:
            work.stop.set()
    if len(work.sources) > 1:
        raise StageFailed(f"the file of reward function {order.target.name!r} has changed while it was scoring")
    return Scored(work.scores, next(iter(work.sources), ""))


def source_in_process(order: ScoringOrder) -> str:
    """The digest of the file that a function is from, found by importing it in a process of its own. Raises
    StageFailed: the function cannot be imported."""
    try:
        with Worker(order) as worker:
            return worker.source
    except Refused as reason:
        raise _unusable(order, reason) from None


def _unusable(order: ScoringOrder, reason: Refused) -> StageFailed:
    return StageFailed(f"reward function {order.target.name!r} cannot be used: {reason}")


class _Work:
    """State that the threads share."""

    def __init__(self, order: ScoringOrder, responses: Sequence[Response], allowed: int | None) -> None:
        self._order, self._responses, self._allowed = order, responses, allowed
        self._size, self._failures = max(len(responses), 1) if order.batch else 1, 0
        self._firsts = iter(range(0, len(responses), self._size))  # threads take from it, one step at a time
        self.scores: list[Score | None] = [None] * len(responses)
        self.sources: set[str] = set()
        self.stop = threading.Event()

    def carry_out(self) -> None:
        with suppress(Stopped), Worker(self._order, self.stop) as worker:
            self.sources.add(worker.source)
            while self._allowed is None or self._failures <= self._allowed:
                if (first := next(self._firsts, None)) is None:
                    return
                some = worker.score(self._responses[first : first + self._size])
                self.scores[first : first + self._size] = some
                self._failures += sum(score.reward is None for score in some)


def _clean(text: str) -> str:
    return shortened(without_secrets(text))


def _safe(score: Score) -> Score:
    """Messages of a function and names of components, without a value of our environment that looks like a secret."""
    named = None if score.components is None else {_clean(name): one for name, one in score.components.items()}
    return replace(score, detail=_clean(score.detail), components=named)
