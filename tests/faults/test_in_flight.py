"""Updates in flight: a kill in a rollout that goes on with responses of older weights, or in the training beside it."""

import pytest

from flows.proof.faults import FLOW, Fault
from infra.fuzz import draws, in_flight
from storage.kill_points import Point
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tests.faults.processes import WORKERS
from tests.faults.running import SmallRun
from tests.faults.small_run import RUN

SETTINGS = ("run.iterations=4", "rollout.ahead=1", "rollout.increments.tokens=1", *in_flight(2))
POINTS = (Point.MID_PART, Point.MID_RESPONSE, Point.PARTS_DONE, Point.COMMITTED)
FAULTS = [
    *(Fault(Stage.ROLLOUT, 4, point, victim) for victim in (FLOW, *WORKERS) for point in POINTS),
    *(Fault(Stage.TRAIN, 3, Point.UPLOAD, victim) for victim in (FLOW, *WORKERS)),
]
QUICK = {"rollout@4:mid-response", "rollout@4:mid-part:engine-0", "train@3:upload"}


@pytest.fixture(scope="module")
def undisturbed(launcher, tmp_path_factory):
    return SmallRun(launcher, tmp_path_factory.mktemp("in-flight") / "run").finished(settings=SETTINGS)


@pytest.mark.parametrize(
    "fault", [pytest.param(one, id=str(one), marks=[] if str(one) in QUICK else [pytest.mark.full]) for one in FAULTS]
)
def test_killed_in_the_middle_of_a_response_it_ends_as_if_undisturbed(launcher, tmp_path, undisturbed, fault):
    run = SmallRun(launcher, tmp_path / "run")
    killed = run.attempt(fault, settings=SETTINGS)
    between = run.look()
    assert (killed.delivered, killed.lingering) == ([fault], [])
    again = run.attempt(settings=SETTINGS)
    assert again.code == 0, again.messages
    end = run.look()
    assert end.digests == undisturbed.digests
    assert end.parts == undisturbed.parts
    assert draws(end.root) == draws(undisturbed.root)
    assert not between.digests.keys() & again.bodies.keys()  # no committed stage is begun again
    assert not between.pieces & {*again.pieces}  # nor is a recorded piece sampled again
    assert verify(end.root, RUN).sound
