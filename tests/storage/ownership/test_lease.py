"""One process at a time drives a run; who may, loses it, and gets it back."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage import layout, records
from storage.errors import CommitConflict, DigestMismatch, LeaseHeld, LeaseLost
from storage.manifest import commit, find
from storage.ownership.lease import Entry, acquire, explain, hold, holder, newest, unlock
from storage.ownership.process import Clock, Life, Owner, _birth, life, this_process
from tasks.stages.names import Stage
from tests.storage.clocks import Time, elsewhere
from tests.storage.flaky import flaky_root
from tests.storage.tables import manifest

SECONDS = 30.0


@pytest.fixture
def moment():
    return Time()


@pytest.fixture
def take(any_root, moment):
    """Acquire with a controlled clock, on every backend."""

    def acquire_as(name, skew=0.0):
        return acquire(any_root, "run", elsewhere(name), SECONDS, moment.clock(skew), moment.pass_by)

    return acquire_as


def test_a_free_run_is_taken_with_a_token_that_rises(take, any_root):
    first = take("one")
    first.check()
    first.release()
    second = take("two")
    assert second.epoch > first.epoch
    assert holder(any_root, "run", second.clock).owner.name == "two"


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


def test_a_holder_that_is_heard_of_no_more_is_replaced_when_its_time_is_over(take, moment):
    first = take("one")
    moment.pass_by(5)
    second = take("two")
    assert SECONDS <= moment.now < SECONDS + 1
    second.check()
    with pytest.raises(LeaseLost, match="not renewed for 30 s"):
        first.check()


def test_renewing_keeps_it(take, moment):
    lease = take("one")
    for _ in range(10):
        moment.pass_by(SECONDS * 0.9)
        lease.renew()
        lease.check()
    moment.pass_by(SECONDS)
    for use in (lease.check, lease.renew):
        with pytest.raises(LeaseLost, match="Start the same command again"):
            use()


def test_a_lease_that_ran_out_is_not_renewed_even_if_nobody_took_it(take, moment, any_root):
    lease = take("one")
    moment.pass_by(SECONDS)
    with pytest.raises(LeaseLost):
        lease.renew()
    assert newest(any_root, "run").number == lease.epoch


def test_a_stale_holder_commits_nothing(take, moment, any_root):
    first = take("one", skew=0)
    moment.pass_by(SECONDS)
    second = take("two")
    with pytest.raises(LeaseLost):
        commit(any_root, manifest(), first)
    assert find(any_root, "run", 1, Stage.ROLLOUT) is None
    assert commit(any_root, manifest(), second).epoch == second.epoch


def test_a_stale_holder_whose_clock_stands_still_is_refused_by_the_store(take, moment, any_root):
    first = take("one")
    first.clock = Time().clock()  # as if no time had passed for it
    moment.pass_by(SECONDS)
    take("two")
    with pytest.raises(LeaseLost, match="taken over by two"):
        commit(any_root, manifest(), first)
    assert find(any_root, "run", 1, Stage.ROLLOUT) is None


class Paused:
    """A lease whose holder falls asleep between the fence's check and the write."""

    def __init__(self, lease, meanwhile):
        self.lease, self.meanwhile, self.epoch = lease, meanwhile, lease.epoch

    def check(self):
        self.lease.check()
        self.meanwhile()


def test_a_commit_that_comes_late_is_the_one_that_all_adopt(take, moment, any_root):
    first, successors = take("one"), []

    def meanwhile():
        moment.pass_by(SECONDS)
        successors.append(take("two"))

    late = commit(any_root, manifest(writer="one", facts={"x": 1}), Paused(first, meanwhile))
    with pytest.raises(CommitConflict, match=r"committed by one.* start again"):
        commit(any_root, manifest(writer="two", facts={"x": 2}), successors[0])
    assert find(any_root, "run", 1, Stage.ROLLOUT) == late


def test_the_run_is_free_at_once_after_a_release(take, moment):
    take("one").release()
    take("two")
    assert moment.now == 0


def test_releasing_what_is_lost_harms_nobody(take, moment, any_root):
    first = take("one")
    moment.pass_by(SECONDS)
    second = take("two")
    first.release()
    second.check()
    assert holder(any_root, "run", second.clock).epoch == second.epoch


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
    quick = root.fs.pipe_file

    def slow(path, data, mode):
        quick(path, data, mode)
        moment.pass_by(SECONDS * 0.6)

    if renewed:
        lease = acquire(root, "run", elsewhere("one"), SECONDS, moment.clock(), moment.pass_by)
        root.fs.pipe_file = slow
        lease.renew()
    else:
        root.fs.pipe_file = slow
        lease = acquire(root, "run", elsewhere("one"), SECONDS, moment.clock(), moment.pass_by)
    lease.check()
    moment.pass_by(SECONDS * 0.5)
    assert holder(root, "run", moment.clock()) is None
    with pytest.raises(LeaseLost):
        lease.check()


def test_a_number_that_gc_freed_gives_no_lease(take, moment, any_root):
    take("one").release()
    others = []

    def steady():
        if not others:  # between the look at the log and the append: a day passes for everybody else
            others.append(take("three"))
            others[0].renew()
            any_root.remove(layout.lease_key("run", 3))
        return moment.now

    clock = Clock(moment.clock().wall, steady)
    with pytest.raises(LeaseHeld, match="driven by three"):
        acquire(any_root, "run", elsewhere("two"), SECONDS, clock, lambda seconds: others[0].renew())
    assert records.read(any_root, layout.lease_key("run", 3), Entry).owner.name == "two"
    others[0].check()


def test_unlock_explains_and_frees(any_root, moment, take):
    clock = moment.clock()
    assert unlock(any_root, "run", elsewhere("me"), clock=clock) == (True, "run run is driven by nobody")
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


def test_unlock_frees_what_has_run_out(any_root, moment, take):
    take("one")
    moment.pass_by(SECONDS)
    free, explanation = unlock(any_root, "run", elsewhere("me"), clock=moment.clock())
    assert free
    assert "has run out" in explanation
    assert newest(any_root, "run").kind == "released"


def test_a_damaged_entry_is_named(any_root):
    any_root.put_if_absent(layout.lease_key("run", 1), b"{")
    with pytest.raises(DigestMismatch, match=layout.lease_key("run", 1)):
        newest(any_root, "run")


def test_this_process_lives_and_one_that_ended_does_not():
    assert life(this_process("me")) is Life.ALIVE
    code = "from storage.ownership import process; print(process.this_process('it').model_dump_json())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    gone = Owner.model_validate_json(ended.stdout)
    assert life(gone) is Life.DEAD
    assert life(this_process("me").model_copy(update={"birth": "1"})) is Life.DEAD
    assert life(gone.model_copy(update={"host": "elsewhere"})) is Life.UNKNOWN
    assert life(gone.model_copy(update={"place": "another boot"})) is Life.UNKNOWN


def test_a_process_that_ended_and_was_not_waited_for_does_not_live():
    process = subprocess.Popen(["sleep", "60"])
    owner = this_process("me").model_copy(update={"process": process.pid, "birth": _birth(process.pid)})
    assert life(owner) is Life.ALIVE
    process.kill()
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert life(owner) is Life.DEAD
    process.wait()


HOLDER = """
import sys, time
from storage.ownership.lease import hold
from storage.backends.root import open_root
with hold(open_root(sys.argv[1]), "run", "worker", float(sys.argv[2])) as lease:
    sys.stdout.write(f"{lease.epoch}\\n"); sys.stdout.flush()
    sys.stdin.read()
"""


def start_holder(url, seconds):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, url, str(seconds)], **pipes)
    assert process.stdout.readline() == "1\n"
    return process


@pytest.mark.parametrize("ending", [signal.SIGKILL, None], ids=["killed", "ended"])
def test_a_process_of_this_machine_that_is_gone_is_replaced_at_once(root, ending):
    process = start_holder(root.url, 3600)
    with (
        pytest.raises(LeaseHeld, match=rf"worker \(host .*, process {process.pid}\), which is running"),
        hold(root, "run", "second"),
    ):
        pass
    process.stdin.close() if ending is None else process.send_signal(ending)
    process.wait()
    with hold(root, "run", "second") as lease:
        lease.check()
        assert "second" in explain("run", holder(root, "run"))


def test_a_process_that_was_stopped_finds_its_run_taken(root):
    process = start_holder(root.url, 0.6)
    process.send_signal(signal.SIGSTOP)
    try:
        while holder(root, "run") is not None:
            time.sleep(0.05)
        with hold(root, "run", "second") as lease:
            process.send_signal(signal.SIGCONT)
            process.communicate()
            lease.check()
    finally:
        process.kill()
        process.wait()
    assert [records.read(root, key, Entry).owner.name for key in root.keys("run/lease")][-1] == "second"


def test_a_lease_is_renewed_while_its_block_works(root):
    with hold(root, "run", "worker", 0.3) as lease:
        deadline = time.monotonic() + 30
        while newest(root, "run").number < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        lease.check()
    assert newest(root, "run").number >= 4
    assert "lease-run" not in {thread.name for thread in threading.enumerate()}


def test_a_block_that_fails_releases(root):
    with pytest.raises(ZeroDivisionError), hold(root, "run", "worker"):
        raise ZeroDivisionError
    assert newest(root, "run").kind == "released"
    assert newest(root, "run").owner.process == os.getpid()
