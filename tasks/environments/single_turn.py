"""The environment of today's runs: one prompt, one response, one reward."""

from collections.abc import Callable, Mapping
from typing import Any

from tasks.environments.protocol import Observation
from tasks.rewards.calling import Caller


class SingleTurn:
    """An environment that is done after one answer, which the run's reward function scores."""

    def __init__(self, prompt: Callable[[Mapping[str, Any]], Observation], reward: Caller) -> None:
        self._prompt, self._reward = prompt, reward
        self._record: Mapping[str, Any] = {}

    async def reset(self, record: Mapping[str, Any], seed: int) -> Observation:
        """Begin with the prompt of the record. Nothing is random, so `seed` has no effect."""
        self._record = record
        return self._prompt(record)

    async def step(self, action: str) -> tuple[None, float | None, bool]:
        """Score the answer; the reward is None if the function gives no number."""
        return None, self._reward.one(self._record, action, None).reward, True
