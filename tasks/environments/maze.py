"""A text game of several turns: walk through a maze to the goal. Its best return is known exactly."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import InputError
from tasks.environments.protocol import Turn

Place = tuple[int, int]  # row and column, from the top left

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_WORD = re.compile("|".join(MOVES))
_ASK = "You are @, walls are #, the goal is G. Say up, down, left or right."


class Maze:
    """Show the maze, and move by the first direction in each answer. The reward at the goal is the fewest possible
    moves divided by the answers that it took, so 1 is the best return of each maze; without the goal it is 0."""

    def __init__(self, size: int = 4, walls: float = 0.25, answers: int = 16) -> None:
        """Of `size` rows and columns, of which about the share `walls` cannot be entered; lost after `answers`, so that
        many `environment.turns` are needed. Raises InputError: no maze is like that."""
        if not (2 <= size <= 16 and 0 <= walls <= 0.5 and answers >= 1):
            fact = f"a maze with size = {size}, walls = {walls:g} and answers = {answers} cannot be made"
            raise InputError(f"{fact}: size is from 2 to 16, walls from 0 to 0.5, and answers at least 1")
        self._size, self._walls, self._most = size, walls, answers

    async def reset(self, record: Mapping[str, Any], seed: int) -> str:
        self.free, self.here, self.goal = made(random.Random(seed), self._size, self._walls)
        self.fewest = distances(self.free, self.goal)[self.here]
        self._answers = 0
        return f"{_ASK}\n{self._drawn()}"

    async def step(self, action: str) -> tuple[str | None, float, bool]:
        self._answers += 1
        word = _WORD.search(action.lower())
        there = self.here if word is None else moved(self.here, word[0])
        blocked, self.here = there not in self.free, there if there in self.free else self.here
        if self.here == self.goal:
            return None, self.fewest / self._answers, True
        if self._answers >= self._most:
            return None, 0.0, True
        said = "That is no direction." if word is None else "There is a wall." if blocked else "You move."
        return f"{said}\n{self._drawn()}", 0.0, False

    async def replay(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            await self.step(turn.action)

    def _drawn(self) -> str:
        def sign(place: Place) -> str:
            return "@" if place == self.here else "G" if place == self.goal else "." if place in self.free else "#"

        return "\n".join("".join(sign((row, column)) for column in range(self._size)) for row in range(self._size))


def made(rng: random.Random, size: int, walls: float) -> tuple[frozenset[Place], Place, Place]:
    """The free places of a maze, the start, and the goal, which is another place that can be reached."""
    every = [(row, column) for row in range(size) for column in range(size)]
    while True:
        free = frozenset(place for place in every if rng.random() >= walls)
        if not free:
            continue
        start = rng.choice(sorted(free))
        if others := sorted(distances(free, start).keys() - {start}):
            return free, start, rng.choice(others)


def moved(place: Place, word: str) -> Place:
    """The place beside another one."""
    return place[0] + MOVES[word][0], place[1] + MOVES[word][1]


def distances(free: frozenset[Place], goal: Place) -> dict[Place, int]:
    """The fewest moves to the goal from each place from which it can be reached: the oracle of the game."""
    found, border = {goal: 0}, [goal]
    for place in border:  # which grows: breadth first
        for word in MOVES:
            if (beside := moved(place, word)) in free and beside not in found:
                found[beside] = found[place] + 1
                border.append(beside)
    return found
