"""One process at a time drives a run: acquiring, losing and regaining the lease."""

import errno
import os

import pytest

from storage import layout
from storage.errors import CommitConflict, LeaseHeld, LeaseLost, StorageInterrupted
from storage.manifest import commit, find
from storage.ownership.lease import acquire, describe, holder, unlock
from storage.ownership.log import newest
from storage.ownership.process import Clock, this_process
from tasks.stages.names import Stage
from tests.storage.clocks import Time, elsewhere
from tests.storage.flaky import flaky_root
from tests.storage.ownership.conftest import SECONDS
from tests.storage.tables import manifest


def test_a_free_run_is_taken_with_a_token_that_rises(take, any_root):
    first = take("one")
    first.check()
    first.release()
    second = take("two")
    assert second.epoch > first.epoch
    assert holder(any_root, "run").owner.name == "two"


def test_a_holder_that_renews_is_not_waited_for(any_root, moment, take):
    lease = take("one")

    def pause(seconds):
        moment.pass_by(seconds)
        if moment.now > 10:
            lease.renew()

    with pytest.raises(LeaseHeld, match=r"driven by one \(host elsewhere, process 7\).*ratchet unlock run --force"):
        acquire(any_root, "run", elsewhere("two"), SECONDS, moment.clock(), pause)
    assert moment.now < SECONDS
    lease.check()


def test_a_holder_of_which_nothing_is_heard_is_replaced_after_a_whole_period(take, moment):
    first = take("one")
    moment.pass_by(SECONDS - 1)  # no process watched it then
    second = take("two")
    assert 2 * SECONDS - 1 <= moment.now < 2 * SECONDS
    second.check()
    for use in (first.check, first.renew):
        with pytest.raises(LeaseLost, match=r"taken over by two.*Start the same command again"):
            use()


@pytest.mark.parametrize("skew", [-86400.0, 31.0, 86400.0])
def test_a_wall_clock_that_is_wrong_takes_no_lease(take, any_root, moment, skew):
    lease = take("one")
    renewed = []

    def pause(seconds):
        moment.pass_by(seconds)
        if moment.now > 10 * (len(renewed) + 1):
            renewed.append(lease.renew())

    with pytest.raises(LeaseHeld, match="driven by one"):
        acquire(any_root, "run", elsewhere("two"), SECONDS, moment.clock(skew), pause)
    lease.check()


@pytest.mark.parametrize("skew", [-86400.0, 86400.0])
def test_a_wall_clock_that_is_wrong_does_not_lengthen_the_watch(take, moment, skew):
    take("one", skew)
    take("two").check()
    assert SECONDS <= moment.now < SECONDS + 1


def test_renewing_keeps_it(take, moment, any_root):
    lease = take("one")
    for _ in range(10):
        moment.pass_by(SECONDS * 0.9)
        lease.renew()
        lease.check()
    assert newest(any_root, "run").number == 11


def test_a_holder_that_was_frozen_goes_on_if_nobody_followed(take, moment, any_root):
    lease = take("one")
    moment.pass_by(100 * SECONDS)
    assert commit(any_root, manifest(), lease).epoch == lease.epoch
    assert newest(any_root, "run").number == lease.epoch + 1, "the commit has renewed it first"
    moment.pass_by(100 * SECONDS)
    lease.renew()
    lease.check()


def test_a_stale_holder_commits_nothing(take, any_root):
    first, second = take("one"), take("two")
    with pytest.raises(LeaseLost, match="taken over by two"):
        commit(any_root, manifest(), first)
    assert find(any_root, "run", 1, Stage.ROLLOUT) is None
    assert commit(any_root, manifest(), second).epoch == second.epoch


def test_a_stale_holder_whose_clock_did_not_move_is_refused_by_the_store(take, any_root):
    first = take("one")
    first.clock = Time().clock()  # no time has passed for it
    take("two")
    with pytest.raises(LeaseLost, match="taken over by two"):
        commit(any_root, manifest(), first)


def test_a_renewal_of_the_next_holder_is_not_taken_for_ones_own(take):
    first, second = take("one"), take("two")
    second.renew()
    for use in (first.check, first.renew, first.check):
        with pytest.raises(LeaseLost, match="taken over by two"):
            use()
    second.check()


def test_an_entry_that_was_removed_is_a_lost_lease(take, any_root):
    lease = take("one")
    any_root.remove(layout.lease_key("run", 1))
    with pytest.raises(LeaseLost, match=r"000000001\.json was removed"):
        lease.check()


def test_who_waits_learns_of_the_loss(take):
    first, told = take("one"), []
    first.on_lost(told.append)
    second = take("two")
    assert first.lost is None
    for use in (first.check, first.check):
        with pytest.raises(LeaseLost):
            use()
    first.on_lost(told.append)
    assert [str(loss) for loss in told] == [str(first.lost)] * 2
    assert second.lost is None


def test_a_fence_that_cannot_look_refuses(root, monkeypatch):
    lease = acquire(root.cap_patience(0.1), "run", elsewhere("one"), SECONDS, Time().clock())
    scandir = os.scandir

    def stale(folder):
        if str(folder).endswith("/lease"):
            raise OSError(errno.ESTALE, "Stale file handle", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", stale)
    with pytest.raises(StorageInterrupted, match="Stale file handle"):
        commit(root, manifest(), lease)
    assert find(root, "run", 1, Stage.ROLLOUT) is None
    monkeypatch.undo()
    assert lease.lost is None, "what is not known is not a loss"
    assert commit(root, manifest(), lease).epoch == lease.epoch


def test_a_fence_whose_store_is_away_refuses_and_then_goes_on(s3, s3_root):
    lease = acquire(s3_root, "run", elsewhere("one"), SECONDS, Time().clock())
    lease.root = s3_root.cap_patience(0.1)
    s3.faults.away = True
    for use in (lease.check, lease.renew):
        with pytest.raises(StorageInterrupted):
            use()
    s3.faults.away = False
    assert commit(s3_root, manifest(), lease).epoch == lease.epoch


class Paused:
    """A lease whose holder freezes between the fence's check and the write."""

    def __init__(self, lease, meanwhile):
        self.lease, self.meanwhile, self.epoch = lease, meanwhile, lease.epoch

    def check(self):
        self.lease.check()
        self.meanwhile()


def test_a_commit_that_comes_late_is_the_one_that_all_adopt(take, any_root):
    first, successors = take("one"), []

    def meanwhile():
        successors.append(take("two"))

    late = commit(any_root, manifest(writer="one", facts={"x": 1}), Paused(first, meanwhile))
    with pytest.raises(CommitConflict, match=r"committed by one.* start again"):
        commit(any_root, manifest(writer="two", facts={"x": 2}), successors[0])
    assert find(any_root, "run", 1, Stage.ROLLOUT) == late


def test_the_run_is_free_at_once_after_a_release(take, moment):
    take("one").release()
    take("two")
    assert moment.now == 0


def test_a_release_that_a_full_disk_refuses_frees_the_run_for_this_process(moment):
    root = flaky_root(["ok", "disk full"])
    for owner in (this_process("one"), this_process("two")):  # one call in a notebook, and the next
        lease = acquire(root, "run", owner, SECONDS, moment.clock(), moment.pass_by)
        lease.release()
    assert lease.epoch == 2
    assert moment.now == 0


def test_a_process_that_took_the_run_over_and_ended_did_take_it_over(take):
    first = take("one")
    take("two").release()
    with pytest.raises(LeaseLost, match="it was taken over by two"):
        first.check()


def test_releasing_what_is_lost_harms_nobody(take, any_root):
    first, second = take("one"), take("two")
    first.release()
    second.check()
    assert holder(any_root, "run").epoch == second.epoch


@pytest.mark.parametrize("fault", ["server error", "timeout"])
def test_answers_that_were_lost_lose_no_lease(moment, fault):
    root = flaky_root([f"lost {fault}"] * 3)
    lease = acquire(root, "run", elsewhere("one"), SECONDS, moment.clock(), moment.pass_by)
    lease.renew()
    lease.check()
    lease.release()
    assert newest(root, "run").kind == "released"


def test_a_renewal_that_failed_and_happened_all_the_same_is_ours(moment):
    root = flaky_root(["ok", "lost denied"])
    lease = acquire(root, "run", elsewhere("one"), SECONDS, moment.clock(), moment.pass_by)
    moment.pass_by(20)
    with pytest.raises(Exception, match="AccessDenied"):
        lease.renew()
    lease.check()
    moment.pass_by(5)
    lease.renew()
    assert newest(root, "run").number == 3
    moment.pass_by(29)
    lease.check()


@pytest.mark.parametrize("renewed", [False, True], ids=["acquired", "renewed"])
def test_a_lease_counts_from_before_it_was_asked_for(moment, renewed):
    root = flaky_root()
    quick = root.backend.fs.pipe_file

    def slow(path, data, mode):
        quick(path, data, mode)
        moment.pass_by(SECONDS * 0.6)

    if renewed:
        lease = acquire(root, "run", elsewhere("one"), SECONDS, moment.clock(), moment.pass_by)
        root.backend.fs.pipe_file = slow
        lease.renew()
    else:
        root.backend.fs.pipe_file = slow
        lease = acquire(root, "run", elsewhere("one"), SECONDS, moment.clock(), moment.pass_by)
    number = newest(root, "run").number
    lease.check()
    assert newest(root, "run").number == number
    moment.pass_by(SECONDS * 0.5)
    lease.check()
    assert newest(root, "run").number == number + 1, "its period was over, so it had to be renewed"


def test_unlock_explains_and_frees(any_root, moment, take):
    clock = moment.clock()
    assert unlock(any_root, "run", elsewhere("me"), clock=clock) == (True, "run run is not driven by any process")
    lease = take("one")
    free, explanation = unlock(any_root, "run", elsewhere("me"), clock=clock)
    assert not free
    assert "driven by one (host elsewhere, process 7)" in explanation
    lease.check()
    free, explanation = unlock(any_root, "run", elsewhere("me"), force=True, clock=clock)
    assert free
    with pytest.raises(LeaseLost, match="ended by me"):
        lease.check()
    with pytest.raises(LeaseLost):
        lease.renew()
    take("two").check()


def test_unlock_says_what_ends_a_silence(any_root, moment, take):
    take("one")
    assert describe(holder(any_root, "run"), moment.clock()) == "one (host elsewhere, process 7)"
    moment.pass_by(100 * SECONDS)
    assert "process 7), silent since 2026-01-01 00:00:00 UTC" in describe(holder(any_root, "run"), moment.clock())
    free, explanation = unlock(any_root, "run", elsewhere("me"), clock=moment.clock())
    assert not free
    assert "takes the run over after it has waited 30 s without hearing from the holder" in explanation


def test_unlock_says_so_if_the_holder_renews_meanwhile(any_root, moment, take):
    lease = take("one")

    def wall():
        lease.renew()
        return moment.clock().wall()

    free, explanation = unlock(any_root, "run", elsewhere("me"), force=True, clock=Clock(wall, moment.clock().steady))
    assert not free
    assert "driven by one" in explanation
    lease.check()
