import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from storage import write_behind
from storage.errors import LeaseLost, StorageError, StorageUnavailable, told
from storage.write_behind import WriteBehind


def failing() -> None:
    raise StorageUnavailable("no space left")


def test_jobs_are_done_in_order_behind_the_caller():
    done, go = [], threading.Event()
    with WriteBehind() as outbox:
        outbox.add(lambda: (go.wait(), done.append("upload")))
        outbox.add(lambda: done.append("manifest"))
        assert not outbox.idle
        assert done == []
        go.set()
        outbox.settle()
        assert done == ["upload", "manifest"]
        assert outbox.idle


def test_jobs_have_the_context_of_the_caller():
    """Prefect finds its server there, and would start a second one for a job that logs."""
    server, found = contextvars.ContextVar("server", default="another"), []
    server.set("this one")
    with WriteBehind() as outbox:
        outbox.add(lambda: found.append(server.get()))
    assert found == ["this one"]


def test_threads_that_add_at_once_share_one_thread_of_the_outbox(monkeypatch):
    made = []

    class Slow(threading.Thread):
        def __init__(self, **given) -> None:
            made.append(self)
            time.sleep(0.1)
            super().__init__(**given)

    adding = [threading.Thread(target=lambda: outbox.add(lambda: None)) for _ in range(4)]
    with WriteBehind() as outbox:
        monkeypatch.setattr(write_behind, "threading", SimpleNamespace(Thread=Slow))
        for one in adding:
            one.start()
        for one in adding:
            one.join()
    assert len(made) == 1


def test_nothing_follows_a_failure():
    done, go = [], threading.Event()
    outbox = WriteBehind()
    outbox.add(lambda: (go.wait(), failing()))
    outbox.add(lambda: done.append("manifest"))
    go.set()
    for _ in range(2):  # each time a caller waits for what was added
        with pytest.raises(StorageUnavailable, match="no space left"):
            outbox.settle()
    with pytest.raises(StorageUnavailable):
        outbox.add(lambda: done.append("later"))
    assert done == []


def test_a_failure_is_raised_when_somebody_asks_whether_all_is_done():
    outbox = WriteBehind()
    outbox.add(failing)
    with pytest.raises(StorageUnavailable):
        while not outbox.idle:
            pass


def test_leaving_the_block_waits_and_raises():
    with pytest.raises(StorageUnavailable), WriteBehind() as outbox:
        outbox.add(failing)


def test_what_went_wrong_in_the_block_is_what_is_raised(caplog):
    done = []
    with pytest.raises(StorageError, match="a rank died"), WriteBehind() as outbox:
        outbox.add(lambda: done.append("upload"))
        outbox.add(failing)
        raise StorageError("a rank died")
    assert done == ["upload"]
    assert "no space left" in caplog.text


def test_an_error_of_another_kind_does_not_hide_that_of_the_block(caplog):
    def broken() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(StorageError, match="a rank died") as raised, WriteBehind() as outbox:
        outbox.add(broken)
        raise StorageError("a rank died")
    assert told(raised.value) == "a rank died\nWhat was still to be stored is not: the disk is gone"
    assert "the disk is gone" in caplog.text


def test_a_job_is_repeated_as_often_as_it_is_asked_for_and_later_ones_wait():
    done, left = [], [2]

    def failing_twice() -> None:
        if left[0]:
            left[0] -= 1
            failing()
        done.append("upload")

    with WriteBehind() as outbox:
        outbox.repeat(lambda error, attempts: 0.0 if attempts < 3 else None)
        outbox.add(failing_twice)
        outbox.add(lambda: done.append("manifest"))
    assert done == ["upload", "manifest"]


def test_an_interrupt_does_not_wait_for_the_next_attempt():
    begun = threading.Event()
    clock = time.monotonic()
    with pytest.raises(KeyboardInterrupt), WriteBehind(linger=60) as outbox:
        outbox.repeat(lambda error, attempts: begun.set() or 3600.0)
        outbox.add(failing)
        begun.wait()
        raise KeyboardInterrupt
    assert time.monotonic() - clock < 60


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, LeaseLost])
def test_an_interrupt_waits_for_the_job_in_progress_and_drops_the_others(end):
    done, begun, go = [], threading.Event(), threading.Event()
    with pytest.raises(end), WriteBehind(linger=60) as outbox:
        outbox.add(lambda: (begun.set(), go.wait(), done.append("upload")))
        outbox.add(lambda: done.append("manifest"))
        begun.wait()
        threading.Timer(0.1, go.set).start()
        raise end
    assert done == ["upload"]


@pytest.fixture
def interruptible():
    """Python's own handler: libraries that other tests import install one that does not wake a waiting thread."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("when", ["in the block", "at its end", "after an error"])
def test_an_interrupt_does_not_wait_for_ever(caplog, when):
    done, begun, go = [], threading.Event(), threading.Event()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), WriteBehind(linger=0.1) as outbox:
        outbox.add(lambda: (begun.set(), go.wait(60), done.append("upload")))
        outbox.add(lambda: done.append("manifest"))
        begun.wait()
        if when == "in the block":
            raise KeyboardInterrupt
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        if when == "after an error":
            raise StorageError("a rank died")
    assert time.monotonic() - started < 30
    assert "took longer than 0.1 s; the next start repeats it" in caplog.text
    go.set()
    time.sleep(0.1)
    assert "manifest" not in done, "nothing follows, even when the upload ends after all"


LEFT_BEHIND = """
import sys, time
from storage.write_behind import WriteBehind
with WriteBehind(linger=0.1) as outbox:
    outbox.add(lambda: time.sleep(600))
    raise KeyboardInterrupt
"""


def test_an_upload_that_was_left_behind_does_not_keep_the_process():
    ended = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=60, check=False)
    assert "KeyboardInterrupt" in ended.stderr


def test_a_caller_waits_for_one_job_and_not_for_those_behind_it():
    done, go = [], threading.Event()
    with WriteBehind() as outbox:
        outbox.add(lambda: done.append("rewards"), (1, "reward"))
        outbox.add(go.wait, (1, "train"))
        outbox.settle((1, "reward"))
        outbox.settle((0, "reward"))
        assert done == ["rewards"]
        assert not outbox.idle
        go.set()
