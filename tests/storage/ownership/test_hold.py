"""Holding a lease for a block of code: other processes, threads and signals."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from storage.errors import LeaseHeld, LeaseLost
from storage.manifest import commit
from storage.ownership import lease as lease_module
from storage.ownership import log
from storage.ownership.lease import acquire, check_free, explain, hold, holder, unlock
from storage.ownership.log import newest
from storage.ownership.process import this_process
from tests.storage.clocks import elsewhere
from tests.storage.tables import manifest

HOLDER = """
import sys, time
from storage.ownership.lease import hold
from storage.backends.root import open_root
with hold(open_root(sys.argv[1]), "run", "worker", float(sys.argv[2])) as lease:
    sys.stdout.write(f"{lease.epoch}\\n"); sys.stdout.flush()
    sys.stdin.read()
"""


def start_holder(url, seconds):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, url, str(seconds)], **pipes)
    assert process.stdout.readline() == "1\n"
    return process


@pytest.mark.parametrize("ending", [signal.SIGKILL, None], ids=["killed", "ended"])
def test_a_process_of_this_machine_that_is_gone_is_replaced_at_once(root, ending):
    process = start_holder(root.url, 3600)
    with (
        pytest.raises(LeaseHeld, match=rf"worker \(host .*, process {process.pid}\), which is alive"),
        hold(root, "run", "second"),
    ):
        pass
    process.stdin.close() if ending is None else process.send_signal(ending)
    process.wait()
    with hold(root, "run", "second") as lease:
        lease.check()
        assert "second" in explain("run", holder(root, "run"))


def test_a_holder_that_is_stopped_is_not_called_running(root):
    process = start_holder(root.url, 3600)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with pytest.raises(LeaseHeld, match=rf"is stopped \(`kill -CONT {process.pid}` continues it\) and was last heard"):
        check_free(root, "run")
    process.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, process.pid, os.WCONTINUED)
    with pytest.raises(LeaseHeld, match=r"is alive and was last heard from at \d{4}-.* UTC\. Wait for it or end it"):
        check_free(root, "run")
    process.communicate("")


def take_from_stopped(root):
    while True:
        try:
            return acquire(root, "run", this_process("second"), 3600)
        except LeaseHeld:  # it renewed its lease just before it was stopped
            time.sleep(0.05)


def test_a_process_that_was_stopped_finds_its_run_taken(root):
    process = start_holder(root.url, 0.6)
    process.send_signal(signal.SIGSTOP)
    try:
        lease = take_from_stopped(root)
        process.send_signal(signal.SIGCONT)
        process.wait(timeout=60)  # it ends by itself: nothing closes its standard input
        lease.check()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    said = process.stderr.read()
    assert "LeaseLost: this process no longer drives run run: it was taken over by second" in said


def test_a_process_that_was_stopped_goes_on_if_nobody_followed(root):
    process = start_holder(root.url, 0.3)
    try:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1)
        number = newest(root, "run").number
        process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 30
        while newest(root, "run").number < number + 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.communicate("", timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert newest(root, "run").epoch == 1
    assert newest(root, "run").number > number + 3


def test_a_lease_is_renewed_while_its_block_works(root):
    with hold(root, "run", "worker", 0.3) as lease:
        deadline = time.monotonic() + 30
        while newest(root, "run").number < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        lease.check()
    assert newest(root, "run").number >= 4
    assert "lease-run" not in {thread.name for thread in threading.enumerate()}


def test_a_log_stays_short_while_its_block_works(root, monkeypatch):
    monkeypatch.setattr(log, "KEPT_ENTRIES", 2)
    with hold(root, "run", "worker", 0.1):
        deadline = time.monotonic() + 30
        while newest(root, "run").number < 10 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(root.keys("run/lease")) <= 4, "two, the one just written, and its temporary file"


def test_a_block_that_fails_releases(root):
    with pytest.raises(ZeroDivisionError), hold(root, "run", "worker"):
        raise ZeroDivisionError
    assert newest(root, "run").kind == "released"
    assert newest(root, "run").owner.process == os.getpid()


def end_by_force(root, run="run"):
    """End a lease as `ratchet unlock --force` does; a renewal at the same moment can be first."""
    while not unlock(root, run, this_process("second"), force=True)[0]:
        pass


def test_a_block_ends_when_its_lease_is_lost(root):
    before = signal.getsignal(signal.SIGURG)
    with pytest.raises(LeaseLost, match="ended by second") as loss, hold(root, "run", "worker", 0.3):
        end_by_force(root)
        time.sleep(60)
    assert isinstance(loss.value.__cause__, KeyboardInterrupt), "nothing on the way treats it as a failure of the work"
    assert signal.getsignal(signal.SIGURG) == before
    assert "lease-run" not in {thread.name for thread in threading.enumerate()}


def test_an_error_that_the_end_of_a_block_became_is_the_loss(root):
    with pytest.raises(LeaseLost), hold(root, "run", "worker", 0.3):
        end_by_force(root)
        try:
            time.sleep(60)
        finally:
            raise ValueError("as Prefect does when it is interrupted at the start of a task run")


@pytest.mark.parametrize("lost", ["outer", "inner"])
def test_of_two_blocks_the_right_one_ends(root, lost):
    def work():
        with hold(root, "inner", "worker", 0.3):
            end_by_force(root, lost)
            time.sleep(60)

    with pytest.raises(LeaseLost, match=f"no longer drives run {lost}"), hold(root, "outer", "worker", 0.3) as lease:
        try:
            work()
        finally:
            if lost == "inner":
                lease.check()
    assert {run: newest(root, run).owner.name for run in ("inner", "outer")} == {
        "inner": "second" if lost == "inner" else "worker",
        "outer": "second" if lost == "outer" else "worker",
    }


def test_a_block_in_a_thread_is_told(root):
    told = []

    def work():
        with hold(root, "run", "worker", 0.3) as lease:
            lost = threading.Event()
            lease.on_lost(lambda loss: lost.set())
            end_by_force(root)
            assert lost.wait(60)
            told.append(lease.lost)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert "ended by second" in str(told[0])
    assert newest(root, "run").owner.name == "second", "what is lost is not released"


def test_a_lease_outlives_an_outage_that_is_longer_than_its_period(s3, s3_root):
    with hold(s3_root, "run", "worker", 0.6) as lease:
        with s3.gone_for(2):
            assert commit(s3_root, manifest(), lease).epoch == lease.epoch
        lease.check()
    assert newest(s3_root, "run").epoch == 1


def test_a_store_that_is_away_at_the_end_does_not_keep_the_block(s3, s3_root, caplog, monkeypatch):
    monkeypatch.setattr(lease_module, "_RELEASE_SECONDS", 0.2)
    ended = threading.Event()

    def come_back():
        if not ended.wait(s3_root.patience / 2):
            s3.faults.away = False

    back = threading.Thread(target=come_back)
    with hold(s3_root, "run", "worker", 3600):
        s3.faults.away = True
        back.start()
    ended.set()
    back.join()
    assert s3.faults.away, "it did not wait for the store"
    s3.faults.away = False
    assert "could not be released" in caplog.text


def test_a_process_at_work_on_this_machine_is_not_waited_for(root):
    with hold(root, "run", "ratchet run", 3600), pytest.raises(LeaseHeld, match="which is alive"):
        check_free(root, "run")


def test_a_silent_process_of_another_machine_does_not_refuse_a_start(root):
    acquire(root, "run", elsewhere("one"))
    check_free(root, "run")
    assert holder(root, "run").owner.name == "one"
