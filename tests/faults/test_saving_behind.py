"""A train state is stored while later stages run: the effects of a crash, a different result and a full disk.

The state of iteration 1 is held back until something waits for it, so the overlap is certain: undisturbed, that is the
rollout of iteration 2, once it has generated all its pieces.
"""

from collections import Counter

import pytest

from flows.proof.faults import Fault
from storage.kill_points import Point
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tests.faults.running import SmallRun, watched
from tests.faults.small_run import RUN
from tests.small.config import PIECES

DURING_UPLOAD = Fault(Stage.TRAIN, 1, Point.UPLOAD)
PENDING = {(1, Stage.TRAIN), (1, Stage.WEIGHT_SYNC), (1, Stage.EVALUATE), (2, Stage.ROLLOUT)}
"""The state and everything made from it, including the rollout."""
COMMITTED = {
    (0, Stage.PREPARE), (0, Stage.TRAIN), (0, Stage.WEIGHT_SYNC), (0, Stage.EVALUATE),
    (1, Stage.ROLLOUT), (1, Stage.REWARD),
}  # fmt: skip


@pytest.fixture
def run(launcher, tmp_path):
    """A run with a concurrent reader, which never sees a manifest without its parts."""
    small = SmallRun(launcher, tmp_path / "run")
    with watched(small.root) as watch:
        yield small
    assert watch.wrong == []
    assert len(watch.seen) == len(small.look().contents.manifests)


def test_what_is_made_from_a_state_is_published_after_it(run, whole):
    attempt = run.attempt(hold_state=1)
    assert attempt.code == 0, attempt.messages
    published = [(one.iteration, one.stage) for one in attempt.reached if one.point is Point.COMMITTED]
    assert published[6:10] == [(1, Stage.TRAIN), (1, Stage.WEIGHT_SYNC), (1, Stage.EVALUATE), (2, Stage.ROLLOUT)]
    begun = [(one.iteration, one.stage, one.point) for one in attempt.reached]
    assert begun.index((2, Stage.ROLLOUT, Point.STARTED)) < begun.index((1, Stage.TRAIN, Point.PARTS_DONE))
    # one state at a time is being stored: nothing is made from samples whose weights are not durable
    assert begun.index((2, Stage.ROLLOUT, Point.COMMITTED)) < begun.index((2, Stage.REWARD, Point.STARTED))
    assert run.look().digests == whole[1].digests


def test_killed_during_the_upload_the_next_rollouts_pieces_are_used(run, whole):
    killed = run.attempt(DURING_UPLOAD, hold_state=1)
    between = run.look()
    assert (killed.code, killed.delivered, killed.lingering) == (-9, [DURING_UPLOAD], [])
    assert killed.bodies.keys() == COMMITTED | PENDING  # each of these was done
    assert between.digests.keys() == COMMITTED
    assert [iteration for iteration, _ in sorted(between.pieces)] == [1] * PIECES + [2] * PIECES
    assert_completed_with_the_pieces_there(run, whole)


@pytest.mark.slow
def test_pieces_of_a_state_that_came_out_otherwise_are_not_used(run, launcher, tmp_path):
    killed = run.attempt(DURING_UPLOAD, hold_state=1)
    between = run.look()
    assert (killed.code, killed.lingering) == (-9, [])
    again = run.attempt(other_lesson=1)
    assert again.code == 0, again.messages
    other = SmallRun(launcher, tmp_path / "other")
    assert other.attempt(other_lesson=1).code == 0
    end, expected = run.look(), other.look()
    assert [iteration for iteration, _ in again.pieces] == [2] * PIECES
    assert not set(again.pieces) & between.pieces
    assert end.digests == expected.digests
    assert end.parts == expected.parts
    lost = {end.contents.pieces[key].key for key in end.contents.pieces if key not in expected.contents.pieces}
    found = verify(end.root, RUN)
    assert found.sound
    assert len(lost) == PIECES
    assert lost <= {finding.key for finding in found.findings} <= between.keys


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault(Stage.WEIGHT_SYNC, 1, Point.STARTED, "trainer-1"),
        Fault(Stage.EVALUATE, 1, Point.STARTED, "engine-0"),
        Fault(Stage.ROLLOUT, 2, Point.STARTED, "engine-0"),
    ],
    ids=str,
)
def test_a_worker_that_is_replaced_during_the_upload_is_given_what_is_stored(run, whole, fault):
    attempt = run.attempt(fault, hold_state=1, replaces=True)
    assert attempt.code == 0, attempt.messages
    assert attempt.delivered == [fault]
    order = [(one.iteration, one.stage, one.point) for one in attempt.reached]
    here = order.index((fault.iteration, fault.stage, Point.STARTED))
    stored = order.index((1, Stage.TRAIN, Point.COMMITTED))
    assert here < stored < order.index((fault.iteration, fault.stage, Point.PARTS_DONE))
    assert run.look().digests == whole[1].digests


@pytest.mark.slow
def test_a_disk_that_is_full_for_the_state_keeps_back_all_that_is_made_from_it(run, whole):
    failed = run.attempt(hold_state=1, full_disk=1)
    between = run.look()
    assert failed.code == 2
    assert "StorageUnavailable: no space left" in failed.messages
    assert failed.bodies.keys() == COMMITTED | PENDING
    assert failed.lingering == []
    assert between.digests.keys() == COMMITTED
    assert verify(between.root, RUN).sound
    assert_completed_with_the_pieces_there(run, whole)


def assert_completed_with_the_pieces_there(run, whole):
    """Check that another start does only what is not committed, and ends like the uninterrupted run."""
    again = run.attempt()
    assert again.code == 0, again.messages
    assert again.bodies == Counter(whole[1].digests.keys() - COMMITTED)
    assert again.pieces == []
    assert run.look().digests == whole[1].digests
    assert run.look().parts == whole[1].parts
