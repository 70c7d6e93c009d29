"""Answers to a judge's questions: of an address, or of an engine of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import httpx

from tasks.rewards.sample import Score, failed
from tasks.rewards.words import shown

LONGEST_WAIT_S = 60.0
_TRANSIENT = (408, 409, 425, 429)


class Unanswered(Exception):
    """A question that has no answer; `after_s` is the time to wait that the address asks for, and a `final` failure
    would only repeat itself."""

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


class Address:
    """An OpenAI-compatible address."""

    exact = False

    def __init__(self, url: str, seconds: float, client: httpx.Client) -> None:
        self.name, self._seconds, self._client = url, seconds, client

    @classmethod
    @contextmanager
    def opened(cls, url: str, api_key: str, seconds: float) -> Iterator["Address"]:
        bearer = {"authorization": f"Bearer {api_key}"} if api_key else {}
        with httpx.Client(base_url=f"{url.rstrip('/')}/", timeout=seconds, headers=bearer) as client:
            yield cls(url, seconds, client)

    def answer(self, request: str, attempt: int) -> str:
        try:
            found = self._client.post("chat/completions", content=request, headers={"content-type": "application/json"})
            found.raise_for_status()
        except httpx.TimeoutException:
            raise Unanswered(failed("timeout", f"the judge did not answer within {self._seconds:g} s")) from None
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            detail = f"the judge answered with status {code}: {shown(error.response.text)}"
            final = code < 500 and code not in _TRANSIENT
            raise Unanswered(failed("exception", detail), _asks_to_wait(error.response), final) from None
        except httpx.HTTPError as error:
            detail = f"the judge cannot be reached: {type(error).__name__}: {error}"
            raise Unanswered(failed("exception", detail)) from None
        return found.text


def _asks_to_wait(answer: httpx.Response) -> float:
    given = answer.headers.get("retry-after", "")
    return min(float(given), LONGEST_WAIT_S) if given.replace(".", "", 1).isdecimal() else 0.0
