"""Advantages and losses of the user's own: loaded, called, and checked at each call.

An error names the user's file and line, the expected value and the given one."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from storage.errors import InputError, NumericsError, RatchetError, user_line
from trainer_core.objectives.advantage_config import UserAdvantage
from trainer_core.objectives.loss_config import UserLoss
from trainer_core.objectives.scored import ScoredSamples
from trainer_core.objectives.tokens import TokenLoss, Tokens
from trainer_core.objectives.user_config import UserTable, found_code
from trainer_core.user_code import UserFunction

_KEYS = {UserAdvantage: "train.policy.advantage", UserLoss: "train.policy.loss"}
_GIVEN = {UserAdvantage: "scored", UserLoss: "tokens"}


def user_advantage(scored: ScoredSamples, code: UserAdvantage) -> NDArray[np.float32]:
    """Advantages of the user's function: (N,), or with `per_token` (R,); 0 where a sample does not count. Raises
    InputError: it fails, or does not return such an array of numbers. Raises NumericsError: a value is not finite."""
    call = _loaded(code.model_dump_json(), type(code))
    found = call(_read_only(scored))
    size = int(scored.lengths.sum()) if code.per_token else len(scored.lengths)
    expected = f"a numpy array of numbers, {(size,)}: one for each {'response token' if code.per_token else 'sample'}"
    if not isinstance(found, np.ndarray) or found.shape != (size,) or found.dtype.kind not in "fiu":
        raise call.refused(f"returns {_shape(found)}, not {expected}")
    counted = np.repeat(scored.usable, scored.lengths) if code.per_token else scored.usable
    with np.errstate(over="ignore"):  # what float32 cannot hold is counted below
        values = np.where(counted, found, 0).astype(np.float32)
    if not (finite := np.isfinite(values)).all():
        raise call.not_finite(int(np.count_nonzero(~finite)), size)
    return values


def user_loss(tokens: Tokens, code: UserLoss) -> TokenLoss:
    """Loss of the user's function, (R,); `clipped` is 0 if it returns the loss alone. Raises InputError: it fails, or
    does not return such a tensor with the gradient of `tokens.logprobs`. Raises NumericsError: a value is not
    finite."""
    call, logprobs = _loaded(code.model_dump_json(), type(code)), tokens.logprobs
    given = {"logprobs": logprobs, **tokens.values}
    versions = {name: value._version for name, value in given.items()}  # torch counts writes in place
    found: Any = call(tokens)
    for name, value in given.items():
        if value._version != versions[name]:
            raise call.refused(f"changes tokens.{name} in place, which is read again later: make a new tensor")
    if isinstance(found, TokenLoss):
        found = (found.loss, found.clipped)
    pair = found if isinstance(found, tuple) and len(found) == 2 else (found, torch.zeros_like(logprobs))
    loss, clipped = call.tensor(pair[0], "loss", logprobs), call.tensor(pair[1], "clipped", logprobs)
    if loss.dtype != logprobs.dtype:
        raise call.refused(f"returns a loss of {loss.dtype}, not of {logprobs.dtype}")
    if logprobs.requires_grad and not loss.requires_grad:
        raise call.refused("returns a loss without gradient: compute it from tokens.logprobs, not detached")
    if not (finite := torch.isfinite(loss)).all():
        raise call.not_finite(int((~finite).sum()), len(loss))
    return TokenLoss(loss, clipped.detach().float())


@dataclass(frozen=True)
class _Call:
    """The user's function with its arguments, or the object that the user's class made."""

    key: str
    target: UserFunction
    function: Callable[..., Any]
    arguments: dict[str, Any]
    line: str

    def __call__(self, given: ScoredSamples | Tokens) -> Any:
        with _refusing(self.key, self.target):
            return self.function(given, **self.arguments)

    def tensor(self, value: object, name: str, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or (value.shape, value.device) != (like.shape, like.device):
            expected = f"a tensor {tuple(like.shape)} on {like.device}: one for each response token"
            raise self.refused(f"returns {_shape(value)} as {name}, not {expected}")
        return value

    def refused(self, reason: str) -> InputError:
        return InputError(f"{_named(self.key, self.target)} {reason}{self.line}")

    def not_finite(self, count: int, of: int) -> NumericsError:
        fact = f"{_named(self.key, self.target)} returns {count} of {of} values that are not finite as float32"
        return NumericsError(f"{fact}{self.line}")


@functools.cache
def _loaded(document: str, kind: type[UserAdvantage | UserLoss]) -> _Call:
    """The code of a table, loaded once. Raises InputError if it has changed, or cannot be imported or called so."""
    code: UserTable = kind.model_validate_json(document)
    key = _KEYS[kind]
    target, _ = found_code(code.function, code.source, key)
    arguments = dict(code.arguments)
    with _refusing(key, target):
        function = target.load().function
        if isinstance(function, type):
            function, arguments = function(**arguments), {}
    called = function if inspect.isroutine(function) else type(function).__call__
    place = inspect.unwrap(called).__code__.co_firstlineno if inspect.isfunction(inspect.unwrap(called)) else None
    line = f" ({Path(target.place).name}, line {place})" if place is not None else ""
    call = _Call(key, target, function, arguments, line)
    if not callable(function):
        raise call.refused(f"is of type {type(function).__name__}, not a function or a class with a method __call__")
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        given = ", ".join([_GIVEN[kind], *(f"{name}={value!r}" for name, value in arguments.items())])
        raise call.refused(f"takes {inspect.signature(function)} and is called with ({given}): {error}") from None
    except ValueError:
        pass  # written in C: its call tells
    return call


@contextmanager
def _refusing(key: str, target: UserFunction) -> Iterator[None]:
    try:
        yield
    except RatchetError as error:
        raise InputError(f"{_named(key, target)}: {error}{user_line(error)}") from None
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        told = f"{type(error).__name__}: {error}{user_line(error)}"
        raise InputError(f"{_named(key, target)} fails: {told}") from error


def _named(key: str, target: UserFunction) -> str:
    return f"{key}.function {target.name!r}"


def _read_only(scored: ScoredSamples) -> ScoredSamples:
    """The same arrays, which other readers share: numpy refuses to write to them."""
    views = {name: array.view() for name, array in vars(scored).items() if array is not None}
    for view in views.values():
        view.flags.writeable = False
    return replace(scored, **views)


def _shape(value: object) -> str:
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{type(value).__name__} {tuple(value.shape)} of {value.dtype}"
    return type(value).__name__
