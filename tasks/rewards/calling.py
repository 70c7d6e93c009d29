"""Calling a reward function: its parameters, bound by name, its keyword arguments, and the number it returns."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.rewards.sample import LARGEST, Sample, Score, failed
from tasks.rewards.words import described, shown, storable

_GIVEN = {False: ("record", "response", "sample"), True: ("records", "responses", "samples")}
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_KNOWN = "(record, response), (record, response, sample) and, with batch = true, (records, responses[, samples])"
_MOST_COMPONENTS, _LONGEST_NAME = 50, 64


class NotCallable(TypeError):
    """A function cannot be given a response: its parameters are not those that are known."""


class NoNumber(TypeError):
    """It is no number, and no table of numbers."""


class NotFinite(ValueError):
    """A number in it is not finite as float32."""


class Caller:
    """A function with the arguments of the configuration bound to it."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        weights: Mapping[str, float],
        batch: bool,
        caught: type[BaseException] = Exception,
    ) -> None:
        """Raises NotCallable: the function cannot be called so. Its errors of the kind `caught` are recorded."""
        self._function, self._arguments, self._weights = function, dict(arguments), weights
        self._caught = caught
        self._loop: asyncio.Runner | None = None
        self._parameters = parameters_of(function, arguments, batch)
        self.batched, self.wants_sample = batch, self._parameters.wants_sample

    def one(self, record: Mapping[str, Any], response: str, sample: Sample | None) -> Score:
        """Score one response; an error of the function, or a result that is no number, is recorded and no score."""
        try:
            return self._score(self._call(record, response, sample))
        except self._caught as error:
            return _raised(error)

    def batch(
        self, records: Sequence[Mapping[str, Any]], responses: Sequence[str], samples: Sequence[Sample] | None
    ) -> list[Score]:
        """Score all responses in one call."""
        try:
            values = self._call(records, responses, samples)
            found = [] if isinstance(values, Mapping | str) else list(values)  # a mapping would give its keys
        except self._caught as error:
            return [_raised(error)] * len(responses)
        if len(found) != len(responses):
            wrong = f"returned a {type(values).__name__} with {len(found)} results for {len(responses)} responses"
            return [failed("no_number", wrong)] * len(responses)
        return [self._score(value) for value in found]

    def _call(self, first: object, second: object, third: object) -> Any:
        value = self._parameters.call(self._function, (first, second, third), self._arguments)
        if inspect.isawaitable(value):
            self._loop = self._loop or asyncio.Runner()  # kept: clients that a function keeps belong to their loop
            return self._loop.run(_awaited(value))
        return value

    def _score(self, value: object) -> Score:
        try:
            reward, components = _measured(value, self._weights)
        except NoNumber as flaw:
            return failed("no_number", storable(str(flaw)))
        except NotFinite as flaw:
            return failed("non_finite", storable(str(flaw)))
        except self._caught as error:  # a number's own conversion, or the methods of a mapping
            return failed("exception", described(error))
        return Score(reward, "ok", components=components)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function, to which values are bound by name."""

    batch: bool
    wants_sample: bool  # True if it has one called `sample`, or `samples` of a batch
    positional: tuple[tuple[str, Any], ...]  # names and defaults of those that can only be given by position

    def call(self, function: Callable[..., Any], values: Sequence[object], arguments: Mapping[str, Any]) -> Any:
        """The result of the function for a record, a response and a sample, or for lists of these."""
        names = _GIVEN[self.batch][: 3 if self.wants_sample else 2]
        given = {**dict(zip(names, values, strict=False)), **arguments}
        first = [given.pop(name, default) for name, default in self.positional]
        return function(*first, **given)


def parameters_of(function: Callable[..., Any], arguments: Mapping[str, Any], batch: bool) -> Parameters:
    """The parameters of a function to call with these keyword arguments. Raises NotCallable: it cannot be called so."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions in C
        raise NotCallable(f"the names of its parameters are not known. {_repair(batch, {})}") from None
    found = {name: one for name, one in signature.parameters.items() if one.kind not in _ANY}
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    names, empty = _GIVEN[batch], inspect.Parameter.empty
    needed = [name for name, one in found.items() if one.default is empty and name not in (*names, *arguments)]
    flaws = [
        *(f"has no parameter {name!r}" for name in names[:2] if not takes_any and name not in found),
        *(f"requires {name!r}, which is not given" for name in needed),
        *(f"has no parameter {name!r} for that argument" for name in arguments if not takes_any and name not in found),
        *(f"cannot be given {name!r} as an argument: it is the sample's" for name in names if name in arguments),
    ]
    if flaws:
        plain = [one.replace(annotation=empty) for one in signature.parameters.values()]
        written = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
        raise NotCallable(f"{written} {', and '.join(flaws)}. {_repair(batch, found)}")
    positional = [(name, one.default) for name, one in found.items() if one.kind is inspect.Parameter.POSITIONAL_ONLY]
    return Parameters(batch, names[2] in found, tuple(positional))


def weighted(parts: Mapping[str, tuple[float, float]]) -> float:
    """Sum of value times weight, by name. Raises NotFinite: it is not finite as float32."""
    return _finite(sum(value * weight for value, weight in parts.values()), f"the sum of {', '.join(parts)} is")


def _measured(value: object, weights: Mapping[str, float]) -> tuple[float, dict[str, float] | None]:
    """The reward, and its components if `value` is a mapping: then it is their sum, each with its weight or 1."""
    if not isinstance(value, Mapping):
        number = _finite(value, "returned")
        if weights:
            raise NoNumber(f"returned {shown(value)}, but weights need a mapping of named components")
        return number, None
    components = {_name(name): _finite(one, f"component {name!r} is") for name, one in value.items()}
    if not components or len(components) > _MOST_COMPONENTS:
        raise NoNumber(f"returned a mapping of {len(components)} components; 1 to {_MOST_COMPONENTS} are possible")
    if missing := sorted(weights.keys() - components.keys()):
        raise NoNumber(f"returned {', '.join(components)}, but there is a weight for {', '.join(missing)}")
    return weighted({name: (one, weights.get(name, 1.0)) for name, one in components.items()}), components


def _finite(value: object, what: str) -> float:
    """`value` as a number that the reward table can hold: also a truth value or a NumPy scalar."""
    found = f"{what} {shown(value)}"
    if isinstance(value, str | bytes | bytearray):
        raise NoNumber(f"{found}, which is not a number")
    try:
        number = float(value)  # pyright: ignore[reportArgumentType] - raises for anything that is not a number
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError) as error:
        raise NoNumber(f"{found}, which is not a number ({error})") from None
    if not abs(number) <= LARGEST:
        raise NotFinite(f"{found}, which is not finite as float32")
    return number


def _name(name: object) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        raise NoNumber(f"returned a component {shown(name)}: a name is a text of 1 to {_LONGEST_NAME} characters")
    return name


def _repair(batch: bool, found: Mapping[str, object]) -> str:
    known = f"Values are given by name; known are {_KNOWN}"
    if set(_GIVEN[not batch][:2]) <= found.keys():
        return f"{known}: set batch = {'false' if batch else 'true'} beside it"
    return f"{known}: name its parameters so, or call it from a function that has these"


def _raised(error: BaseException) -> Score:
    return failed("exit" if isinstance(error, SystemExit) else "exception", described(error))


async def _awaited(value: Any) -> Any:
    return await value
