"""Programs against tests, in the sandbox of `code_tests`, with what failed told after each try."""

import functools
from collections.abc import Mapping
from typing import Any

from tasks.environments.protocol import Turn
from tasks.rewards.code import SECONDS, check_programs, failed_test, read_tests

_checked = functools.cache(check_programs)  # once in the process from which those of conversations are forked


class Programs:
    """Show the record's `prompt`. An answer whose program passes all tests of the record has the reward 1 and is the
    last; after another one the policy is told what went wrong, without the text of the tests, and tries again."""

    def __init__(
        self,
        field: str = "tests",
        seconds: float = SECONDS,
        memory_mb: int = 512,
        answers: int = 3,
        image: str = "",
    ) -> None:
        """Arguments as of `code_tests`; after so many `answers` the reward is 0. Raises InputError: there is no
        sandbox."""
        _checked(image)
        self._limits = {"field": field, "seconds": seconds, "memory_mb": memory_mb, "image": image}
        self._most = answers

    async def reset(self, record: Mapping[str, Any], seed: int) -> str:
        read_tests(record, self._limits["field"])
        self._record, self._answers = record, 0
        return record["prompt"]

    async def step(self, action: str) -> tuple[str | None, float, bool]:
        self._answers += 1
        flaw = failed_test(self._record, action, **self._limits)
        if flaw is None or self._answers >= self._most:
            return None, float(flaw is None), True
        return f"Your program does not pass the tests: {flaw}", 0.0, False

    async def replay(self, turns: list[Turn]) -> None:
        """Count the tries: nothing else is left of a turn."""
        self._answers = len(turns)
