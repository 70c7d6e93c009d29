"""A judge: a model, at an OpenAI-compatible address or on an engine of the run, that scores responses by a rubric.

It runs in the calling process, with threads and deadlines of its own: what was asked is kept in the run's root, which
no scoring process can reach. An exchange is kept once a score was read from it, so a failure is asked again."""

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
from pydantic import Field, ValidationError, field_validator, model_validator

from storage.digest import value_digest
from storage.errors import InputError, RatchetError
from storage.exchanges import Exchange, RunExchanges
from tasks.rewards.reward_model import RewardModel
from tasks.rewards.sample import LARGEST, Score, failed
from tasks.rewards.words import shown
from trainer_core.config import Frozen

_FIELD = re.compile(r"\{(\w+)\}")
_FIRST_WAIT_S = 0.25
_OF_AN_ADDRESS = ("model", "api_key", "seconds", "per_minute")
LONGEST_WAIT_S = 60.0
_TRANSIENT = (408, 409, 425, 429)


class Unanswered(Exception):
    """A question without an answer. `after_s`: the wait that the address asks for; if `final`, it would fail again."""

    def __init__(self, score: Score, after_s: float = 0.0, final: bool = False) -> None:
        super().__init__(score.detail)
        self.score, self.after_s, self.final = score, after_s, final


class Respondent(Protocol):
    """Source of answers; called by several threads."""

    @property
    def name(self) -> str:
        """Part of the identity of an exchange: a URL, or the digest of a model."""
        ...

    @property
    def exact(self) -> bool:
        """True if the same request at temperature 0 has the same answer."""
        ...

    def answer(self, request: str, attempt: int) -> str:
        """The body of the answer to the body of a request for a chat completion. Raises Unanswered; or WorkerLost: the
        engine that was to answer has died, and nothing is known about the response."""
        ...


@dataclass(frozen=True)
class Address:
    """An OpenAI-compatible address."""

    name: str
    seconds: float
    client: httpx.Client
    exact = False

    @classmethod
    @contextmanager
    def opened(cls, url: str, api_key: str, seconds: float) -> Iterator["Address"]:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        with httpx.Client(base_url=f"{url.rstrip('/')}/", timeout=seconds, headers=headers) as client:
            yield cls(url, seconds, client)

    def answer(self, request: str, attempt: int) -> str:
        try:
            found = self.client.post("chat/completions", content=request)
            found.raise_for_status()
        except httpx.TimeoutException:
            raise Unanswered(failed("timeout", f"the judge did not answer within {self.seconds:g} s")) from None
        except httpx.HTTPStatusError as error:
            code, asked = error.response.status_code, error.response.headers.get("retry-after", "")
            detail = f"the judge answered with status {code}: {shown(error.response.text)}"
            after_s = min(float(asked), LONGEST_WAIT_S) if asked.replace(".", "", 1).isdecimal() else 0.0
            final = code < 500 and code not in _TRANSIENT
            raise Unanswered(failed("exception", detail), after_s, final) from None
        except httpx.HTTPError as error:
            detail = f"the judge cannot be reached: {type(error).__name__}: {error}"
            raise Unanswered(failed("exception", detail)) from None
        return found.text


class Remembered(dict[str, Exchange]):
    """Exchanges that are kept by this process alone."""

    def find(self, digest: str) -> Exchange | None:
        return self.get(digest)

    def keep(self, digest: str, exchange: Exchange) -> Exchange:
        return self.setdefault(digest, exchange)


class Judge(Frozen):
    """Settings of a judge, the arguments of the reward function `judge`."""

    url: str | None = Field(default=None, pattern=r"^https?://")
    """Base URL, to which `/chat/completions` is appended; without one the run's engine `[engines.judge]` is asked."""
    model: str = ""
    """Model that judges, by its name at the URL."""
    rubric: str
    """Message to the judge. `{response}` stands for the response, and `{name}` for a field of the record."""
    api_key: str = ""
    """Key of the address, by reference: `env:NAME`. It is not part of what is kept."""
    score: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; its last match in the answer counts."""
    scale: float = Field(default=1.0, gt=0)
    """Divisor of the score."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(default=512, ge=1)
    """Limit on its answer, in tokens."""
    seconds: float = Field(default=60.0, gt=0)
    """Deadline of one request."""
    retries: int = Field(default=4, ge=0)
    """Further requests after one that failed: no connection, time-out, refusal for load, answer without a score."""
    at_once: int = Field(default=8, ge=1, le=256)
    """Requests under way at a time."""
    per_minute: float | None = Field(default=None, gt=0)
    """Most requests that begin in a minute."""

    @field_validator("rubric")
    @classmethod
    def _shows_the_response(cls, rubric: str) -> str:
        if "{response}" not in rubric:
            raise ValueError("it must contain {response}, or the judge sees no response")
        return rubric

    @field_validator("score")
    @classmethod
    def _has_a_group(cls, score: str) -> str:
        try:
            groups = re.compile(score).groups
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from None
        if groups < 1:
            raise ValueError("it has no group: put the number of the score in brackets, as in 'score: ([0-9]+)'")
        return score

    @model_validator(mode="after")
    def _for_an_address(self) -> "Judge":
        if self.url is not None and not self.model:
            raise ValueError("a judge at a URL needs the name of its model: set model")
        given = [name for name in _OF_AN_ADDRESS if self.url is None and name in self.model_fields_set]
        if given:
            raise ValueError(f"{', '.join(given)} has no effect without url, on an engine of the run: leave it out")
        return self

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Judge":
        """The judge of a configuration. Raises InputError: an argument is unknown, missing or cannot be used."""
        try:
            return cls.model_validate(dict(arguments))
        except ValidationError as flaws:
            first = flaws.errors(include_url=False, include_input=False)[0]
            name = ".".join(["reward.arguments", *map(str, first["loc"])])
            fact = f"{name} of the judge: {first['msg']}"
            raise InputError(f"{fact}. Its arguments are {', '.join(cls.model_fields)}") from None

    def question(self, record: Mapping[str, Any], response: str) -> dict[str, Any]:
        """The body of a request. Raises KeyError: the rubric names a field that the record lacks."""
        given = {**record, "response": response}
        text = _FIELD.sub(lambda found: _text(given[found[1]]), self.rubric)
        own = {} if self.url is None else {"model": self.model}
        how = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {**own, "messages": [{"role": "user", "content": text}], **how}

    def read(self, body: str) -> float:
        """The score in an answer. Raises ValueError: it is no answer, or has no score."""
        try:
            found = re.findall(self.score, said := json.loads(body)["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError, RecursionError):
            raise ValueError(f"the answer is not of the OpenAI form: {shown(body)}") from None
        if not found:
            raise ValueError(f"the answer has no score: {shown(said)}")
        score = float(found[-1] if isinstance(found[-1], str) else found[-1][0]) / self.scale
        if not abs(score) <= LARGEST:
            raise ValueError(f"the score {score:g} is not finite as float32: {shown(said)}")
        return score


@dataclass
class _Asking:
    """A judge and the server or engine that answers for it; used by several threads."""

    judge: Judge
    respondent: Respondent
    exchanges: RunExchanges | Remembered
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _pace: threading.Lock = field(default_factory=threading.Lock)
    _next: float = 0.0

    def score(self, record: Mapping[str, Any], response: str) -> Score:
        """The score of one response, from an exchange that was kept or from the judge."""
        try:
            body = self.judge.question(record, response)
        except KeyError as lacking:
            return failed("exception", f"the rubric names {lacking}, which the record lacks")
        digest = value_digest([self.respondent.name, body])
        with self._locks.setdefault(digest, threading.Lock()):  # equal responses are asked about once
            if (kept := self.exchanges.find(digest)) is None:
                return self._asked(digest, json.dumps(body))
        try:
            return Score(self.judge.read(kept.response), "ok")
        except ValueError as flaw:  # it was kept by another pattern
            return failed("no_number", str(flaw))

    def _asked(self, digest: str, text: str) -> Score:
        attempt = 0
        while True:
            attempt += 1
            try:
                kept = self.exchanges.keep(digest, self._once(text, attempt))
            except Unanswered as failure:
                if failure.final or attempt > self.judge.retries:
                    return failure.score
                if not self.respondent.exact:
                    time.sleep(failure.after_s or min(_FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S))
            else:
                return Score(self.judge.read(kept.response), "ok")

    def _once(self, text: str, attempt: int) -> Exchange:
        self._wait()
        begun = time.monotonic()
        answer = self.respondent.answer(text, attempt)
        try:
            self.judge.read(answer)
        except ValueError as flaw:
            final = self.respondent.exact and not self.judge.temperature
            raise Unanswered(failed("no_number", str(flaw)), final=final) from None
        spent = time.monotonic() - begun
        return Exchange(url=self.respondent.name, request=text, response=answer, seconds=spent, attempts=attempt)

    def _wait(self) -> None:
        """Wait for the turn of the next request."""
        if self.judge.per_minute is None:
            return
        with self._pace:
            begins = max(self._next, time.monotonic())
            self._next = begins + 60 / self.judge.per_minute
        time.sleep(max(0.0, begins - time.monotonic()))


@dataclass(frozen=True)
class Judges:
    """Exchanges and engine of the judges of a run."""

    exchanges: RunExchanges | Remembered = field(default_factory=Remembered)
    engine: Respondent | None = None  # the run's engine for a judge without a URL; None if it has none
    model: RewardModel | None = None
    """The reward model that this engine serves in place of a judge; None if there is none."""


def judge(record: Mapping[str, Any], response: str, **arguments: Any) -> float:
    """Ask a judge once about a response, without keeping anything. Raises ValueError: it gave no score."""
    (score,) = judged(arguments, [(record, response)], Judges())
    if score is None or score.reward is None:
        raise ValueError("" if score is None else score.detail)
    return score.reward


def judged(
    arguments: Mapping[str, Any],
    responses: Sequence[tuple[Mapping[str, Any], str]],
    judges: Judges,
    allowed: int | None = None,
    cleaned: Callable[[str], str] = str,
) -> list[Score | None]:
    """Scores of responses to records. After `allowed` failures no more are asked: their scores are None. What is told
    of a failure is `cleaned` of secrets. Raises InputError (an argument cannot be used) or WorkerLost (the engine that
    judges has died)."""
    settings = Judge.of(arguments)
    failures, over = deque[None](), threading.Event()

    def score(one: tuple[Mapping[str, Any], str]) -> Score | None:
        if over.is_set():
            return None
        try:
            found = asking.score(*one)
        except RatchetError:
            over.set()
            raise
        if found.reward is None:
            failures.append(None)
        if allowed is not None and len(failures) > allowed:
            over.set()
        return Score(found.reward, found.status, cleaned(found.detail), found.reason)

    with _respondent(settings, judges.engine) as respondent:
        asking = _Asking(settings, respondent, judges.exchanges)
        with ThreadPoolExecutor(settings.at_once) as threads:
            return list(threads.map(score, responses))


def _respondent(settings: Judge, engine: Respondent | None) -> AbstractContextManager[Respondent]:
    if settings.url is not None:
        return Address.opened(settings.url, settings.api_key, settings.seconds)
    if engine is None:
        raise InputError(
            "the reward `judge` has no reward.arguments.url, and the run has no engine for it: give the URL of an "
            "OpenAI-compatible judge, or start a new run with the judge's model as engines.judge.source"
        )
    return nullcontext(engine)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
