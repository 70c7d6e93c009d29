"""Environments of the package `verifiers`: their rollouts through the run's endpoint, their rubrics as the reward."""

import functools
import importlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from storage.errors import InputError
from tasks.rewards.words import described

Failures = list[Exception]

_OF_GROUPS = {"states", "prompts", "completions", "answers", "tasks", "infos"}
"""Parameters by which the package knows a function that scores a group."""

try:
    # by name: what is checked here is checked without the package, which is an extra
    openai, vf = (importlib.import_module(name) for name in ("openai", "verifiers"))
except ModuleNotFoundError:
    raise InputError("the environment `verifiers` needs its package: pip install verifiers==0.1.10") from None


class Verifiers:
    """An environment of `verifiers`, loaded once for all conversations. It speaks to the policy as to any model."""

    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None, model: str = "policy") -> None:
        """`environment` is its id and `arguments` are its own; `model` is `environment.model`. Raises InputError: it
        has no function that scores one rollout alone."""
        self._name, self._model = environment, model
        self._environment, self._failures = _loaded(environment, json.dumps(dict(arguments or {}), sort_keys=True))

    async def drive(self, base_url: str, api_key: str, record: Mapping[str, Any], seed: int) -> float:
        """The score of a rollout about a record of its data set. What the environment draws by `random` follows from
        the seed. Raises an error of the environment, its tools, its sandbox or its judge: no number comes of it."""
        random.seed(seed)
        self._failures.clear()
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            state = await self._environment.rollout(self._given(record), client, self._model)
            _check(state["error"])
            await self._environment.rubric.score_rollout(state)
        if self._failures:  # the package logs them, and counts them as 0
            raise self._failures[0]
        return float(state["reward"])

    def _given(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The record as the package takes it."""
        prompt = record["prompt"]
        if isinstance(prompt, str) and self._environment.message_type == "chat":
            prompt = [{"role": "user", "content": prompt}]
        known = {"answer": "", "task": self._name, "example_id": 0}
        return {**known, **{key: one for key, one in record.items() if one is not None}, "prompt": prompt}


@functools.cache  # the host of a run loads it, and each conversation is a fork of the host
def _loaded(name: str, arguments: str) -> tuple[Any, Failures]:
    """The environment, and the failures of its functions in the rollout that is scored now."""
    failures: Failures = []
    try:
        found = vf.load_environment(name, **json.loads(arguments))
    except Exception as error:  # noqa: BLE001 - the module of the environment may raise anything
        raise InputError(f"verifiers cannot load {name!r}: {described(error)}") from None
    for rubric in _rubrics(found.rubric):
        for function in rubric.funcs:
            if _OF_GROUPS & set(inspect.signature(function).parameters):
                fact = f"{name!r} scores whole groups by {function.__name__}"
                raise InputError(f"{fact}, but a conversation is scored alone: name an environment that does so")
        rubric.funcs = [_noting(function, failures) for function in rubric.funcs]
    return found, failures


def _rubrics(rubric: Any) -> Iterator[Any]:
    if isinstance(rubric, vf.RubricGroup):
        for one in rubric.rubrics:
            yield from _rubrics(one)
    else:
        yield rubric


def _noting(function: Callable[..., Any], failures: Failures) -> Callable[..., Any]:
    """The same function, of which each error is noted."""

    @functools.wraps(function)
    async def noting(*values: Any, **named: Any) -> Any:
        try:
            found = function(*values, **named)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:
            failures.append(error)
            raise

    return noting


def _check(error: Exception | None) -> None:
    """Raise the error by which a rollout ended; a call that the policy wrote wrongly is not a failure."""
    if error is not None and not isinstance(error, vf.ToolParseError):
        raise RuntimeError(f"{described(error)}, by {described(error.__cause__)}") if error.__cause__ else error
