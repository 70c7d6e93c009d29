"""An environment of several turns: guess a number from "higher" and "lower".

The best player halves what is left, so the oracle knows the fewest turns that are always enough.
"""

import math
import random
import re
from collections.abc import Mapping
from typing import Any


class GuessTheNumber:
    """Think of a number that follows from the seed, and tell the model whether it is higher or lower."""

    def __init__(self, highest: int = 100, turns: int = 7) -> None:
        if turns < math.ceil(math.log2(highest + 1)):
            raise ValueError(f"{turns} turns are not always enough for the numbers up to {highest}")
        self._highest, self._turns = highest, turns

    async def reset(self, record: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        self._secret = random.Random(seed).randint(1, self._highest)
        self._left = self._turns
        asked = record.get("prompt", f"Guess a number from 1 to {self._highest}. Answer with the number alone.")
        return [{"role": "user", "content": asked}]

    async def step(self, action: str) -> tuple[list[dict[str, str]] | None, float, bool]:
        self._left -= 1
        found = re.search(r"\d+", action)
        if found is not None and int(found.group()) == self._secret:
            return None, 1.0, True
        if self._left == 0:
            return None, 0.0, True
        said = "That is no number." if found is None else "Higher." if int(found.group()) < self._secret else "Lower."
        return [{"role": "user", "content": said}], 0.0, False
