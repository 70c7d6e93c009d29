"""The maze: an oracle that knows the distances has exactly the best return, and nobody has more."""

import asyncio
import itertools
import random

import pytest

from storage.errors import InputError
from tasks.environments.maze import MOVES, distances, made, moved
from tasks.environments.playing import load_environment, play

NAME = "tasks.environments.maze:Maze"


def walked(seed, choose, **arguments):
    """The return of a player that chooses a word for each state of the game, and the fewest moves."""
    maze = load_environment(NAME, arguments)
    turns = asyncio.run(play(maze, {}, seed, lambda _: choose(maze)))
    return sum(turn.reward for turn in turns), maze.fewest, len(turns)


def best(maze):
    there = distances(maze.free, maze.goal)
    return f"I go {min(MOVES, key=lambda word: there.get(moved(maze.here, word), 99))}."


@pytest.mark.parametrize("seed", range(20))
def test_the_oracle_has_the_best_return_and_no_player_has_more(seed):
    reward, fewest, answers = walked(seed, best)
    assert (reward, answers) == (1.0, fewest)
    rng = random.Random(seed)
    aimless, fewest, answers = walked(seed, lambda _: rng.choice([*MOVES, "what?"]))
    assert aimless == (fewest / answers if answers >= fewest and aimless else 0.0) <= 1.0


@pytest.mark.parametrize("seed", range(10))
def test_distances_are_those_of_all_walks(seed):
    free, start, goal = made(random.Random(seed), 3, 0.3)
    there = distances(free, goal)
    for length in range(7):
        ends = {walk(free, start, words) for words in itertools.product(MOVES, repeat=length)}
        assert (goal in ends) <= (length >= there[start])
    assert there[start] >= 1


def walk(free, place, words):
    for word in words:
        if (place := moved(place, word)) not in free:
            return None
    return place


def test_the_same_seed_is_the_same_maze_and_mazes_differ():
    mazes = [[made(random.Random(seed), 4, 0.25) for seed in range(20)] for _ in range(2)]
    assert mazes[0] == mazes[1]
    assert len(set(mazes[0])) == 20


def test_what_is_no_move_costs_an_answer_and_too_many_end_it():
    reward, _, answers = walked(3, lambda _: "hm", answers=5)
    assert (reward, answers) == (0.0, 5)
    said = iter(["hm"])
    reward, fewest, answers = walked(3, lambda maze: next(said, None) or best(maze).upper())
    assert (reward, answers) == (fewest / (fewest + 1), fewest + 1)


def test_a_replay_is_where_the_game_was():
    first, second = (load_environment(NAME) for _ in range(2))
    rng = random.Random(0)
    turns = asyncio.run(play(first, {}, 5, lambda _: rng.choice([*MOVES])))
    asyncio.run(second.reset({}, 5))
    asyncio.run(second.replay(turns))
    assert vars(second) == vars(first)


@pytest.mark.parametrize("arguments", [{"size": 1}, {"walls": 0.9}, {"answers": 0}])
def test_what_is_no_maze_is_refused(arguments):
    with pytest.raises(InputError, match=r"cannot be made.*size is from 2 to 16"):
        load_environment(NAME, arguments)
