"""A user's environment: loaded by name, and played with every answer to it checked."""

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard, cast

from storage.errors import InputError
from tasks.environments.calls import by_tags, recorded
from tasks.environments.protocol import Environment, Observation, Turn
from tasks.rewards.words import described, shown
from trainer_core.user_code import Loaded, UserFunction, find_function

GROUP = "ratchet.environments"  # entry points by which an installed package offers environments

_CALLS = {"reset": "async def reset(self, record, seed)", "step": "async def step(self, action)"}
_TRIPLE = "(observation, reward, done)"


def load_environment(name: str, arguments: Mapping[str, Any] | None = None) -> Environment:
    """Make an environment of the class `name` (`file.py:Class`, `package.module:Class`, or an entry point of the group
    `ratchet.environments`) with the arguments. Raises InputError: it cannot be found, imported or made, or lacks a
    method of the protocol."""
    found = find_environment(name)
    made = made_by(found, loaded(found).function, arguments or {})
    if isinstance(made, Driven):
        raise InputError(f"environment {name!r} is a function that drives conversations, and is played by runs alone")
    return made


def find_environment(name: str) -> UserFunction:
    """The place of the class called `name`; nothing is imported. Raises InputError: as `find_function`."""
    return find_function(name, "environment.function", GROUP)


@dataclass(frozen=True)
class Driven:
    """A function that drives conversations through a client of the run's endpoint."""

    function: Callable[..., Awaitable[Any]]
    arguments: Mapping[str, Any]

    async def drive(self, base_url: str, api_key: str, record: Mapping[str, Any], seed: int) -> float:
        """The reward of a conversation. Raises InputError: the function raises, or returns no finite number."""
        name = getattr(self.function, "__name__", "drive")
        given = {"base_url": base_url, "api_key": api_key, "record": record, "seed": seed}
        try:
            reward = await self.function(**given, **self.arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            raise InputError(f"{name} raised {described(error)}") from None
        if not _is_finite(reward):
            raise InputError(f"{name} returned the reward {shown(reward)}, which is not a finite number")
        return float(reward)


def loaded(found: UserFunction) -> Loaded:
    """The class, list of tools or async function that was found, imported. Raises InputError: it cannot be."""
    with _making(found):
        return found.load()


def made_by(found: UserFunction, function: Any, arguments: Mapping[str, Any]) -> Environment | Driven:
    """An environment of that class or list, or what drives conversations. Raises InputError: it cannot be made, or
    lacks a method of the protocol."""
    with _making(found):
        form: Any = _tools(function) if isinstance(function, list | tuple) else function
        made = None if inspect.iscoroutinefunction(form) else form(**arguments)
    if made is None:
        return _driven(found, form, arguments)
    if inspect.iscoroutinefunction(getattr(type(made), "drive", None)):
        return _driven(found, made.drive, {})
    for method, form in _CALLS.items():
        _check_method(found, made, method, form)
    return made


@contextmanager
def _making(found: UserFunction) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        raise InputError(f"environment {found.name!r} cannot be made: {described(error)}") from None


def _tools(offered: Sequence[Any]) -> Callable[..., Environment]:
    from tasks.environments.tools import Tools  # imports pydantic, which most environments do without

    return functools.partial(Tools, offered)


def takes_calls(environment: Environment) -> bool:
    """True if its `step` has a parameter `calls`."""
    return "calls" in inspect.signature(type(environment).step).parameters


def tools_of(environment: Environment) -> list[Any]:
    """The definitions of its tools. Raises InputError: they are none; and whatever a property of that name raises."""
    declared = inspect.getattr_static(type(environment), "tools", None)
    found = declared.__get__(environment) if isinstance(declared, property) else getattr(environment, "tools", ())
    if isinstance(found, list | tuple) and all(isinstance(one, Mapping) for one in found):
        return list(found)
    fact = f"{type(environment).__name__}.tools is {shown(found)}"
    raise InputError(f"{fact}: expected a list of definitions of functions, as OpenAI writes them")


async def play(
    environment: Environment, record: Mapping[str, Any], seed: int, act: Callable[[Observation], str], limit: int = 64
) -> list[Turn]:
    """Play one conversation to its end. `act` gives an answer to an observation; `limit` is the largest number of
    turns. Raises InputError: the environment raises, returns another form, or is not done within the limit."""
    observation = await begun(environment, record, seed)
    turns: list[Turn] = []
    while len(turns) < limit:
        action = act(observation)
        calls = recorded(by_tags(action, tools_of(environment))) if takes_calls(environment) else None
        following, reward, _ = await stepped(environment, action, calls)
        turns.append(Turn(observation, action, reward, calls or ()))
        if following is None:
            return turns
        observation = following
    raise InputError(f"{_place(environment, 'step')} is not done after {limit} turns")


async def begun(environment: Environment, record: Mapping[str, Any], seed: int) -> Observation:
    """The first observation, checked. Raises InputError: the environment raises, or gives no observation."""
    return _checked(environment, "reset", await called(environment, environment.reset, record, seed))


async def stepped(
    environment: Environment, action: str, calls: Sequence[Mapping[str, str]] | None = None
) -> tuple[Observation | None, float | None, bool]:
    """The answer to an action, with its calls if it takes them, checked; its observation is None if, and only if, the
    conversation is done. Raises InputError: the environment raises, or gives something else."""
    given = (action,) if calls is None else (action, calls)
    following, reward, done = _triple(environment, await called(environment, environment.step, *given))
    if done and following is not None:
        raise InputError(f"{_place(environment, 'step')} speaks after it is done: {shown(following)}; return None")
    return None if done else _checked(environment, "step", following), reward, done


async def called(environment: Environment, method: Callable[..., Awaitable[Any]], *values: object) -> Any:
    """The result of a method. Raises InputError: it raises, with the line of the user's file."""
    try:
        return await method(*values)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        raise InputError(f"{_place(environment, method.__name__)} raised {described(error)}") from None


def _checked(environment: Environment, method: str, value: object) -> Observation:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(map(_is_message, value)):
        return value
    fact = f"{_place(environment, method)} gave the observation {shown(value)}"
    raise InputError(f"{fact}: expected a text, or messages with role and content")


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and abs(cast(float, value)) <= sys.float_info.max  # also of numpy


def _triple(environment: Environment, value: object) -> tuple[object, float | None, bool]:
    if not (isinstance(value, tuple) and len(value) == len(_TRIPLE.split(","))):
        raise InputError(f"{_place(environment, 'step')} returned {shown(value)}: expected {_TRIPLE}")
    observation, reward, done = value
    if not isinstance(done, bool):
        raise InputError(f"{_place(environment, 'step')} returned done = {shown(done)}: expected True or False")
    if reward is not None and not _is_finite(reward):
        fact = f"{_place(environment, 'step')} returned the reward {shown(reward)}"
        raise InputError(f"{fact}: expected a finite int or float, or None")
    return observation, None if reward is None else float(reward), done


def _driven(found: UserFunction, function: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]) -> Driven:
    try:
        inspect.signature(function).bind(base_url="", api_key="", record={}, seed=0, **arguments)
    except TypeError as error:
        fact = f"environment {found.name!r} has the parameters {inspect.signature(function)} ({error})"
        raise InputError(f"{fact}: expected `async def {found.attribute}(base_url, api_key, record, seed)`") from None
    return Driven(function, arguments)


def _check_method(found: UserFunction, made: object, method: str, form: str) -> None:
    if (function := getattr(type(made), method, None)) is None:
        fact = f"environment {type(made).__name__} has no method {method!r} ({Path(found.place).name})"
        raise InputError(f"{fact}: expected `{form}`")
    if not inspect.iscoroutinefunction(function):
        raise InputError(f"{_place(made, method)} is not async: expected `{form}`")
    signature = inspect.signature(function)
    form = form.replace("action", "action, calls") if "calls" in signature.parameters else form
    values = form.partition("(")[2].rstrip(")").split(", ")
    try:
        signature.bind(*values)
    except TypeError as error:
        fact = f"{_place(made, method)} has the parameters {signature} ({error})"
        raise InputError(f"{fact}: expected `{form}`") from None


def _place(environment: object, method: str) -> str:
    """The method with its file and line."""
    function = inspect.unwrap(getattr(type(environment), method))
    code = function.__code__
    return f"{type(environment).__name__}.{method} ({Path(code.co_filename).name}:{code.co_firstlineno})"
