"""Conversations of a run on real processes with small stage bodies, killed within their turns."""

import json
from pathlib import Path

import pytest

from flows.proof.faults import FLOW, Fault
from storage.kill_points import Point
from storage.parts import read_part
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tests.faults.running import SmallRun
from tests.faults.small_run import RUN

FILE = Path(__file__).parents[1] / "tasks/environments/sums.py"
SETTINGS = (
    f'environment.function="{FILE}:Replayed"', "environment.retries=9", "environment.processes=1",
    "evaluate.every=0", 'reward.function="exact_match"', "run.iterations=1", "run.retries=1",
)  # fmt: skip
ROLLOUT = (1, Stage.ROLLOUT)
STARTS = 4
"""Processes that are killed at their first event: a beginning, a call, the failure of that call, and the next call."""


def within(victim: str) -> Fault:
    return Fault(Stage.ROLLOUT, 1, Point.MID_RESPONSE, victim)


@pytest.fixture(scope="module")
def undisturbed(launcher, tmp_path_factory):
    return SmallRun(launcher, tmp_path_factory.mktemp("conversations") / "run").finished(settings=SETTINGS)


def check_equal(run: SmallRun, undisturbed) -> list[str]:
    """Check that tokens, rewards and weights are those of the undisturbed run; returns the reasons of failures."""
    look = run.look()
    assert look.digests == undisturbed.digests
    assert verify(look.root, RUN).sound
    courses = json.loads(read_part(look.root, look.manifests[ROLLOUT].part("played.json")))
    return [failure["reason"] for course in courses for failure in course["failures"]]


def test_kills_of_the_driver_within_turns_change_nothing_in_the_end(launcher, tmp_path, undisturbed):
    run = SmallRun(launcher, tmp_path / "run")
    for _ in range(STARTS):
        assert run.attempt(within(FLOW), settings=SETTINGS).code == -9
    last = run.attempt(settings=SETTINGS)
    assert (last.code, last.lingering) == (0, []), last.messages
    assert check_equal(run, undisturbed) == ["exit"] * 2  # of the calls that were open


@pytest.mark.parametrize("victim", ["environment-0", pytest.param("engine-0", marks=pytest.mark.slow)])
def test_a_process_that_is_killed_within_a_turn_is_replaced(launcher, tmp_path, undisturbed, victim):
    run = SmallRun(launcher, tmp_path / "run")
    attempt = run.attempt(within(victim), settings=SETTINGS, replaces=True)
    assert (attempt.code, attempt.delivered, attempt.lingering) == (0, [within(victim)], []), attempt.messages
    assert set(check_equal(run, undisturbed)) <= {"exit"}
