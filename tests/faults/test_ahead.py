"""Rollouts beside a training: a kill in either, at each of its points, while the other one is in the middle; and with
updates in flight, also in the middle of a response that goes on under newer weights.

A cell is one run with `rollout.ahead = 1`, killed once, started again, and compared with a run that nothing interrupts.
"""

import functools

import pytest

from flows.proof.faults import FLOW, Fault
from infra.fuzz import draws, in_flight
from storage.kill_points import Point
from storage.parts import read_table
from storage.schema import ROLLOUT
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tests.faults.processes import NODE, WORKERS
from tests.faults.running import SmallRun
from tests.faults.small_run import RUN
from tests.small.config import PIECES, PROMPTS, SAMPLES

ITERATIONS = 3
AHEAD = ("rollout.ahead=1", f"run.iterations={ITERATIONS}")
SETTINGS = {
    "between": AHEAD,
    "in-flight": ("rollout.ahead=1", "run.iterations=4", "rollout.increments.tokens=1", *in_flight(2)),
}
TRAINING = (Point.STARTED, Point.MID_PART, Point.UPLOAD, Point.PARTS_DONE, Point.COMMITTED)
SAMPLING = (Point.STARTED, Point.MID_PART, Point.PARTS_DONE, Point.COMMITTED)
GROWING = (Point.MID_PART, Point.MID_RESPONSE, Point.PARTS_DONE, Point.COMMITTED)
CELLS = [
    *(("between", Fault(Stage.TRAIN, 1, point, victim)) for victim in (FLOW, *WORKERS, NODE) for point in TRAINING),
    *(("between", Fault(Stage.ROLLOUT, 2, point, victim)) for victim in (FLOW, *WORKERS, NODE) for point in SAMPLING),
    *(("in-flight", Fault(Stage.ROLLOUT, 4, point, victim)) for victim in (FLOW, *WORKERS) for point in GROWING),
    *(("in-flight", Fault(Stage.TRAIN, 3, Point.UPLOAD, victim)) for victim in (FLOW, *WORKERS)),
]
QUICK = {
    *("train@1:started:engine-0", "train@1:upload:flow", "rollout@2:mid-part:flow"),
    *("rollout@2:mid-part:trainer-1", "rollout@4:mid-response:flow", "train@3:upload:flow"),
}
DAILY = {
    *(str(fault) for updates, fault in CELLS if (updates, fault.victim) == ("between", FLOW)),
    *("train@1:upload:trainer-0", "rollout@2:mid-part:engine-0", "rollout@4:mid-part:engine-0"),
}


def marks(name):
    return [] if name in QUICK else [pytest.mark.slow if name in DAILY else pytest.mark.full]


def beside(updates, fault):
    """Waits by which the other stage is in the middle when the fault comes."""
    if updates == "in-flight":
        return {}
    if fault.stage == Stage.TRAIN:
        return {"rollout@2:mid-part#2": f"train@1:{fault.point}"}
    return {"train@1:started": f"rollout@2:{fault.point}{'#2' if fault.point is Point.MID_PART else ''}"}


@pytest.fixture(scope="module")
def whole(launcher, tmp_path_factory):
    """A run that nothing interrupts, by its `rollout.updates`."""

    @functools.cache
    def finished(updates):
        return SmallRun(launcher, tmp_path_factory.mktemp(updates) / "run").finished(settings=SETTINGS[updates])

    return finished


@pytest.fixture
def undisturbed(whole):
    return whole("between")


@pytest.mark.parametrize(
    ("updates", "fault"),
    [pytest.param(*one, id=f"{one[1]}", marks=marks(str(one[1]))) for one in CELLS],
)
def test_killed_while_both_run_it_ends_as_if_undisturbed(launcher, tmp_path, whole, updates, fault):
    run, settings, expected = SmallRun(launcher, tmp_path / "run"), SETTINGS[updates], whole(updates)
    killed = run.attempt(fault, settings=settings, waits=beside(updates, fault))
    between = run.look()
    assert (killed.delivered, killed.lingering) == ([fault], [])
    assert killed.code == (-9 if fault.victim == FLOW else 1), killed.messages
    again = run.attempt(settings=settings)
    assert again.code == 0, again.messages
    end = run.look()
    assert end.digests == expected.digests
    assert end.parts == expected.parts
    assert draws(end.root) == draws(expected.root)
    assert not between.digests.keys() & again.bodies.keys()  # no committed stage is begun again
    assert not between.pieces & {*again.pieces}  # nor is a recorded piece sampled again
    if updates == "between":  # but for what measures whether the engine repeats itself; else a seed goes on in rounds
        measured = sum(int(end.manifests[place].metrics.get("sampled_again", 0)) for place in again.bodies)
        assert len([seed for seed in again.sampled if seed in between.seeds]) == measured
        assert len(end.pieces) == ITERATIONS * PIECES
    assert verify(end.root, RUN).sound


def test_each_rollout_is_sampled_by_weights_that_are_one_update_older(undisturbed):
    rollouts = [undisturbed.manifests[iteration, Stage.ROLLOUT] for iteration in range(1, ITERATIONS + 1)]
    assert [one.facts["weight_version"] for one in rollouts] == [0, 0, 1]
    assert [one.metrics["staleness"] for one in rollouts] == [0, 1, 1]
    served = {one.inputs["weights"] for one in rollouts}
    assert served == {undisturbed.digests[iteration, Stage.WEIGHT_SYNC] for iteration in (0, 1)}


def test_no_prompt_is_skipped_or_drawn_twice(undisturbed, launcher, tmp_path):
    synchronous = SmallRun(launcher, tmp_path / "run")
    assert synchronous.attempt(settings=AHEAD[1:]).code == 0
    drawn, expected = places(undisturbed), places(synchronous.look())
    assert drawn == expected
    assert len(set(drawn)) == ITERATIONS * PROMPTS * SAMPLES


def places(look):
    """The seed of each sample, which follows from its place in the drawing of prompts, and its prompt."""
    found = []
    for iteration in range(1, ITERATIONS + 1):
        table = read_table(look.root, look.manifests[iteration, Stage.ROLLOUT], ROLLOUT)
        found += zip(table["seed"].to_pylist(), table["prompt_id"].to_pylist(), strict=True)
    return found


def test_a_rollout_that_needs_older_weights_than_those_served_gets_them(undisturbed, launcher, tmp_path):
    run = SmallRun(launcher, tmp_path / "run")
    keep = "storage.keep_newest=1"
    assert run.attempt(settings=("rollout.ahead=1", "run.iterations=2", keep)).code == 0
    assert run.look().manifests.keys() == {place for place in undisturbed.manifests if place[0] < ITERATIONS}
    more = run.attempt(settings=(*AHEAD, keep))
    assert more.code == 0, more.messages
    assert run.look().digests == undisturbed.digests


def test_an_engine_lost_beside_the_training_is_replaced_and_gets_the_weights_that_its_rollout_needs(
    undisturbed, launcher, tmp_path
):
    run, fault = SmallRun(launcher, tmp_path / "run"), Fault(Stage.ROLLOUT, 2, Point.MID_PART, "engine-0")
    attempt = run.attempt(fault, settings=(*AHEAD, "run.retries=1"), waits=beside("between", fault), replaces=True)
    assert attempt.code == 0, attempt.messages
    assert attempt.delivered == [fault]
    assert run.look().digests == undisturbed.digests
    assert len(attempt.pieces) == len(set(attempt.pieces)) == ITERATIONS * PIECES
