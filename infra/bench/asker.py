"""The environment of the bench of conversations: it answers with random words, some time later."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any


class Asker:
    """Tells `told` random words of the first `words` at the beginning and, `wait_s` later, after each answer but the
    last of `turns`."""

    def __init__(self, turns: int, wait_s: float, told: int, words: int) -> None:
        self._left, self._wait_s, self._told, self._words = turns, wait_s, told, words

    async def reset(self, record: Mapping[str, Any], seed: int) -> str:
        """The first words; `seed` decides nothing."""
        self._draw = random.Random(record["id"])
        return self._words_told()

    async def step(self, action: str) -> tuple[str | None, float | None, bool]:
        """The next words, or the end."""
        self._left -= 1
        if not self._left:
            return None, 1.0, True
        await asyncio.sleep(self._wait_s)
        return self._words_told(), None, False

    def _words_told(self) -> str:
        return " ".join(f"w{self._draw.randrange(self._words)}" for _ in range(self._told))
