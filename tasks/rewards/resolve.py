"""Reward functions by name, and their arguments. None of the user's code is imported here."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import JsonValue

from tasks.config.credentials import referenced
from tasks.config.environment import resolve
from trainer_core.user_code import UserFunction, find_function

VERSIONS: Mapping[str, int] = {
    "tasks.rewards.match:exact_match": 1,
    "tasks.rewards.match:characters": 1,
    "tasks.rewards.match:regex": 1,
    "tasks.rewards.math:math_verify": 1,
    "tasks.rewards.code:code_tests": 1,
    "tasks.rewards.judge:judge": 1,
    "tasks.rewards.reward_model:reward_model": 1,
}  # our own functions. A change that makes one score differently raises its version.
_VALUES = {"tasks.rewards.reward_model:reward_model"}
_GRADED = {"tasks.rewards.match:characters", *_VALUES}
_IN_SANDBOX = {"tasks.rewards.code:code_tests"}
_ASKS = {"tasks.rewards.judge:judge", *_VALUES}
_CANNOT_HANG = {"tasks.rewards.match:exact_match", "tasks.rewards.match:characters", *_ASKS}


class Target(UserFunction):
    """The place of a reward function."""

    @property
    def path(self) -> str:
        """Module and attribute, as an entry point names them."""
        return f"{self.place}:{self.attribute}"

    @property
    def version(self) -> int | None:
        """Of one of our own functions; None for others."""
        return VERSIONS.get(self.path)

    @property
    def graded(self) -> bool:
        """True if it is known to give more than 0 and 1."""
        return self.path in _GRADED

    @property
    def needs_sandbox(self) -> bool:
        """True if it runs programs of the policy."""
        return self.path in _IN_SANDBOX

    @property
    def asks(self) -> bool:
        """True if it asks a judge or a reward model, with deadlines of its own."""
        return self.path in _ASKS

    @property
    def values(self) -> bool:
        """True if a reward model scores, which is given token ids."""
        return self.path in _VALUES

    @property
    def needs_process(self) -> bool:
        """True if it must not run in the calling process: it may hang, crash or change that process."""
        return self.path not in _CANNOT_HANG


def find_reward(name: str, key: str = "reward.function") -> Target:
    """The place of the reward function called `name`. Raises InputError, as `find_function`."""
    return Target(**vars(find_function(name, key, "ratchet.rewards")))


def own_function(target: Target) -> Callable[..., Any]:
    """One of our own functions, imported."""
    return vars(importlib.import_module(target.place))[target.attribute]


def values_of(arguments: Mapping[str, Any], key: str = "reward.arguments") -> dict[str, Any]:
    """The arguments with each `env:NAME` replaced by that variable of this process's environment. Raises InputError: a
    variable is not set."""
    return {name: resolve(value, f"{key}.{name}") for name, value in arguments.items()}


def variables_of(arguments: JsonValue) -> Iterator[str]:
    """The variables of the environment that arguments refer to."""
    if isinstance(arguments, dict | list):
        for value in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from variables_of(value)
    elif (variable := referenced(arguments)) is not None:
        yield variable
