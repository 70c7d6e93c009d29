"""Reward functions by name, and their arguments. None of the user's code is imported here."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import JsonValue

from tasks.config.credentials import referenced
from tasks.config.environment import resolve
from trainer_core.user_code import UserFunction, find_function


class Traits(NamedTuple):
    """Facts about a reward function. A change that makes one of ours score differently raises its version."""

    version: int | None = 1  # None for others than ours
    graded: bool = False  # True if it is known to give more than 0 and 1
    needs_sandbox: bool = False  # True if it runs programs of the policy
    asks: bool = False  # True if it asks a judge or a reward model, with deadlines of its own
    values: bool = False  # True if a reward model scores, which is given token ids
    needs_process: bool = True  # True if it may hang, crash or change the calling process


OURS: Mapping[str, Traits] = {
    "tasks.rewards.match:exact_match": Traits(needs_process=False),
    "tasks.rewards.match:characters": Traits(graded=True, needs_process=False),
    "tasks.rewards.match:regex": Traits(),
    "tasks.rewards.math:math_verify": Traits(),
    "tasks.rewards.code:code_tests": Traits(needs_sandbox=True),
    "tasks.rewards.judge:judge": Traits(asks=True, needs_process=False),
    "tasks.rewards.reward_model:reward_model": Traits(graded=True, asks=True, values=True, needs_process=False),
}


class Target(UserFunction):
    """The place of a reward function."""

    @property
    def path(self) -> str:
        """Module and attribute, as an entry point names them."""
        return f"{self.place}:{self.attribute}"

    @property
    def traits(self) -> Traits:
        return OURS.get(self.path, Traits(version=None))

    @property
    def version(self) -> int | None:
        """Of one of our own functions; None for others."""
        return self.traits.version


def find_reward(name: str, key: str = "reward.function") -> Target:
    """The place of the reward function called `name`. Raises InputError, as `find_function`."""
    return Target(**vars(find_function(name, key, "ratchet.rewards")))


def own_function(target: Target) -> Callable[..., Any]:
    """One of our own functions, imported."""
    return vars(importlib.import_module(target.place))[target.attribute]


def values_of(arguments: Mapping[str, Any], key: str = "reward.arguments") -> dict[str, Any]:
    """The arguments, each `env:NAME` replaced by that environment variable. Raises InputError: one is not set."""
    return {name: resolve(value, f"{key}.{name}") for name, value in arguments.items()}


def variables_of(arguments: JsonValue) -> Iterator[str]:
    """The variables of the environment that arguments refer to."""
    if isinstance(arguments, dict | list):
        for value in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from variables_of(value)
    elif (variable := referenced(arguments)) is not None:
        yield variable
