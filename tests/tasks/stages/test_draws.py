"""Dynamic sampling: further prompts until enough groups have a spread of rewards, wherever the run is killed."""

import random

import numpy as np
import pytest

from storage import layout
from storage.backends.root import open_root
from storage.errors import StageFailed
from storage.kill_points import Point
from storage.manifest import need
from storage.parts import read_table
from storage.schema import REWARD, ROLLOUT
from storage.upkeep.verify import verify
from tasks.rewards.scoring import useful_groups
from tasks.stages.draws import further
from tasks.stages.names import Stage
from tests.small.config import SAMPLES, small_config
from tests.small.driving import RUN, Killed, digests, driver, killing, reach

ITERATIONS, MOST = 3, 16
GROUPS = 3  # useful ones, of which each draw is to give as many as lack
CHANCE_LATER = """
import random
from pathlib import Path

def score(record, response):
    with Path(__file__).with_suffix('.asked').open('a+') as file:
        file.write('.')
        return float(file.tell() <= %d or random.random() < 0.5)
"""
NEVER = "def score(record, response):\n    return 1.0\n"
FAILS_LATER = """
from pathlib import Path

def score(record, response):
    with Path(__file__).with_suffix('.asked').open('a+') as file:
        file.write('.')
        if file.tell() > %d:
            raise ValueError('broken')
    return 1.0
"""


@pytest.mark.parametrize(
    ("wanted", "drawn", "useful", "most", "count"),
    [
        (6, 6, 6, 20, 0), (6, 6, 7, 20, 0), (6, 6, 3, 20, 6), (6, 6, 5, 20, 2), (6, 6, 1, 20, 6), (6, 6, 0, 20, 6),
        (6, 6, 3, 8, 2), (6, 8, 3, 8, 0), (6, 12, 4, 20, 6), (6, 12, 5, 20, 3),
    ],
)  # fmt: skip
def test_as_many_are_drawn_as_give_the_groups_that_lack(wanted, drawn, useful, most, count):
    assert further(wanted, drawn, useful, most) == count


def config(*settings):
    """Of a reward that some groups have with a spread."""
    own = (f"rollout.prompts={GROUPS}", f"rollout.most_prompts={MOST}", f"run.iterations={ITERATIONS}")
    return small_config([*own, "train.policy.leave_out_equal_groups=true", "evaluate.every=0", *settings])


@pytest.fixture
def scored_by(tmp_path):
    """The configuration of one iteration scored by a function with that text."""

    def made(text):
        (tmp_path / "mine.py").write_text(text)
        return config(f"reward.function={tmp_path}/mine.py:score", "run.iterations=1")

    return made


def rollouts(root, iterations=ITERATIONS):
    return [need(root, RUN, iteration, Stage.ROLLOUT) for iteration in range(1, iterations + 1)]


def positions(root, manifest):
    return read_table(root, manifest, ROLLOUT, ["position"])["position"].to_numpy()


def rewards(root, iteration):
    return read_table(root, need(root, RUN, iteration, Stage.REWARD), REWARD)


def test_prompts_are_drawn_until_enough_groups_have_a_spread_and_the_next_rollout_goes_on_behind_them(tmp_path):
    root = open_root(str(tmp_path / "root"))
    driver(root, config(), tmp_path / "scratch").drive()
    drawn = 0
    for iteration, one in enumerate(rollouts(root), 1):
        useful = useful_groups(rewards(root, iteration))
        there = positions(root, one)
        assert there.tolist() == np.repeat(np.arange(drawn, drawn + len(there) // SAMPLES), SAMPLES).tolist()
        drawn += len(there) // SAMPLES
        assert one.facts["cursor"] == need(root, RUN, iteration, Stage.TRAIN).facts["cursor"] == drawn
        assert one.metrics["prompts_drawn"] == len(there) // SAMPLES
        assert one.metrics["useful_groups"] == useful
        assert useful >= GROUPS or len(there) == MOST * SAMPLES
    assert ITERATIONS * GROUPS < drawn < ITERATIONS * MOST


def test_the_limit_ends_the_draws(scored_by, tmp_path):
    root = open_root(str(tmp_path / "root"))
    driver(root, scored_by(NEVER), tmp_path / "scratch").drive()
    (one,) = rollouts(root, 1)
    assert (one.facts["cursor"], one.metrics["useful_groups"]) == (MOST, 0)


@pytest.mark.parametrize(
    ("seed", "ahead"),
    [(0, 1), pytest.param(0, 0, marks=pytest.mark.slow)]
    + [pytest.param(seed, ahead, marks=pytest.mark.full) for seed in range(1, 8) for ahead in (0, 1)],
)
def test_a_run_that_is_killed_anywhere_draws_and_learns_the_same(tmp_path, seed, ahead):
    given = config(f"rollout.ahead={ahead}", *(['train.policy.old_policy="behaviour"'] if ahead else []))
    calm, wild = (open_root(str(tmp_path / name)) for name in ("calm", "wild"))
    driver(calm, given, tmp_path / "scratch").drive()
    assert reach(wild, given, tmp_path / "processes", random.Random(seed)) > 1
    assert digests(wild, ITERATIONS) == digests(calm, ITERATIONS)
    assert verify(wild, RUN).sound
    drawn = np.concatenate([positions(wild, one)[::SAMPLES] for one in rollouts(wild)])
    assert drawn.tolist() == [*range(len(drawn))]


def test_scores_that_decided_about_draws_are_kept_though_the_function_answers_by_chance(scored_by, tmp_path):
    root, given = open_root(str(tmp_path / "root")), scored_by(CHANCE_LATER % (GROUPS * SAMPLES))
    with pytest.raises(Killed):  # at the first piece of the second draw
        driver(root, given, tmp_path / "a", at=killing(Stage.ROLLOUT, 1, Point.MID_PART, after=3)).drive()
    (scored,) = [key for key in root.keys("") if "/rewards-" in key and layout.is_part(key)]
    driver(root, given, tmp_path / "b").drive()
    (one,) = rollouts(root, 1)
    assert scored in [part.key for part in one.parts]
    assert useful_groups(rewards(root, 1)) == one.metrics["useful_groups"]
    assert rewards(root, 1).num_rows == len(positions(root, one))


def test_a_function_that_changes_before_the_stage_that_scores_scores_again(scored_by, tmp_path):
    root = open_root(str(tmp_path / "root"))
    with pytest.raises(Killed):
        driver(root, scored_by(NEVER), tmp_path / "a", at=killing(Stage.REWARD, 1, Point.STARTED)).drive()
    driver(root, scored_by(NEVER.replace("1.0", "0.5")), tmp_path / "b").drive()
    assert set(rewards(root, 1)["reward"].to_pylist()) == {0.5}


def test_failures_of_all_draws_together_end_the_rollout(scored_by, tmp_path):
    root, first = open_root(str(tmp_path / "root")), GROUPS * SAMPLES
    with pytest.raises(StageFailed, match=f"rollout of iteration 1: {first} of {2 * first} responses have no score"):
        driver(root, scored_by(FAILS_LATER % first), tmp_path / "a").drive()
    driver(root, scored_by(NEVER), tmp_path / "b").drive()
    assert rollouts(root, 1)[0].facts["cursor"] == MOST
