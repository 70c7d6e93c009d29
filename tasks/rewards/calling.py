"""Calling a reward function: its two or three arguments, its keyword arguments, and what it returns or raises."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tasks.rewards.sample import Sample, Score, failed
from tasks.rewards.value import NoNumber, NotFinite, measured
from tasks.rewards.words import described, storable


class Caller:
    """A function with the arguments of the configuration bound to it."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        weights: Mapping[str, float],
        caught: type[BaseException] = Exception,
    ) -> None:
        """Raises TypeError if the function cannot be called so. What it raises of the kind `caught` is recorded."""
        self._function, self._arguments, self._weights = function, dict(arguments), weights
        self._caught = caught
        self._loop: asyncio.Runner | None = None
        self.wants_sample = takes_sample(function, arguments)

    def one(self, record: Mapping[str, Any], response: str, sample: Sample | None) -> Score:
        """Score one response; what the function raises, or returns instead of a number, is recorded and no score."""
        try:
            value = self._call(record, response, sample)
        except self._caught as error:
            return failed("exit" if isinstance(error, SystemExit) else "exception", described(error))
        return self._score(value)

    def batch(
        self, records: Sequence[Mapping[str, Any]], responses: Sequence[str], samples: Sequence[Sample] | None
    ) -> list[Score]:
        """Score all responses in one call."""
        try:
            values = self._call(records, responses, samples)
            # a mapping would give its keys
            found = [] if isinstance(values, Mapping | str) else list(values)
        except self._caught as error:
            reason = "exit" if isinstance(error, SystemExit) else "exception"
            return [failed(reason, described(error))] * len(responses)
        if len(found) != len(responses):
            wrong = f"returned a {type(values).__name__} with {len(found)} results for {len(responses)} responses"
            return [failed("no_number", wrong)] * len(responses)
        return [self._score(value) for value in found]

    def _call(self, first: object, second: object, third: object) -> Any:
        given = (first, second, third) if self.wants_sample else (first, second)
        value = self._function(*given, **self._arguments)
        if inspect.isawaitable(value):
            self._loop = self._loop or asyncio.Runner()  # kept: clients that a function keeps belong to their loop
            return self._loop.run(_awaited(value))
        return value

    def _score(self, value: object) -> Score:
        try:
            reward, components = measured(value, self._weights)
        except NoNumber as flaw:
            return failed("no_number", storable(str(flaw)))
        except NotFinite as flaw:
            return failed("non_finite", storable(str(flaw)))
        except self._caught as error:  # a number's own conversion, or the methods of a mapping
            return failed("exception", described(error))
        return Score(reward, "ok", components=components)


def takes_sample(function: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a function takes a third argument: one without a default, or of the name `sample`.

    Raises:
        TypeError: it cannot be called with two or three arguments and these keyword arguments.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions in C have none
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [one for one in signature.parameters.values() if one.kind in positional and one.name not in arguments]
    third = names[2] if len(names) > 2 else None
    wanted = third is not None and (third.default is inspect.Parameter.empty or third.name == "sample")
    signature.bind(*[None] * (3 if wanted else 2), **arguments)
    return wanted


async def _awaited(value: Any) -> Any:
    return await value
