import threading

import pytest

from storage.errors import StorageError, StorageUnavailable
from storage.write_behind import Outbox


def failing() -> None:
    raise StorageUnavailable("no space left")


def test_jobs_are_done_in_order_behind_the_caller():
    done, go = [], threading.Event()
    with Outbox() as outbox:
        outbox.add(lambda: (go.wait(), done.append("upload")))
        outbox.add(lambda: done.append("manifest"))
        assert not outbox.idle
        assert done == []
        go.set()
        outbox.settle()
        assert done == ["upload", "manifest"]
        assert outbox.idle


def test_nothing_follows_a_failure():
    done, go = [], threading.Event()
    outbox = Outbox()
    outbox.add(lambda: (go.wait(), failing()))
    outbox.add(lambda: done.append("manifest"))
    go.set()
    for _ in range(2):  # as often as anybody waits for what was added
        with pytest.raises(StorageUnavailable, match="no space left"):
            outbox.settle()
    with pytest.raises(StorageUnavailable):
        outbox.add(lambda: done.append("later"))
    assert done == []


def test_a_failure_is_raised_when_somebody_asks_whether_all_is_done():
    outbox = Outbox()
    outbox.add(failing)
    with pytest.raises(StorageUnavailable):
        while not outbox.idle:
            pass


def test_leaving_the_block_waits_and_raises():
    with pytest.raises(StorageUnavailable), Outbox() as outbox:
        outbox.add(failing)


def test_what_went_wrong_in_the_block_is_what_is_raised(caplog):
    done = []
    with pytest.raises(StorageError, match="a rank died"), Outbox() as outbox:
        outbox.add(lambda: done.append("upload"))
        outbox.add(failing)
        raise StorageError("a rank died")
    assert done == ["upload"]
    assert "no space left" in caplog.text
