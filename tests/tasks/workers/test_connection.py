"""Threads that use Ray while one of them leaves it. The real Ray is in `test_cluster.py`."""

import gc
import threading
import weakref

import pytest

from storage.errors import WorkerLost
from tasks.workers.connection import Connection

WAIT_S = 20.0


class Promise:
    """Something of Ray that must not be let go while it is left."""


def test_whoever_leaves_ray_waits_for_the_calls_of_others_and_what_they_hold_is_kept():
    connection, inside, go_on, done = Connection(), threading.Event(), threading.Event(), threading.Event()
    promise = Promise()
    number, let_go = connection.held_by(promise), weakref.ref(promise)

    def work():
        inside.set()
        assert go_on.wait(WAIT_S)
        done.set()

    caller = threading.Thread(target=connection.call, args=(number, work))
    caller.start()
    assert inside.wait(WAIT_S)
    threading.Timer(0.1, go_on.set).start()
    with connection.leaving():
        assert done.is_set()
        del promise  # as a thread does whose call has failed
        gc.collect()
        assert let_go() is not None
    caller.join(WAIT_S)
    with pytest.raises(WorkerLost, match="has ended; the next attempt starts over"):
        connection.call(number, work)
    connection.call(connection.number, work)


def test_who_waits_looks_whether_ray_lives(monkeypatch):
    connection, looks = Connection(), []

    def check():
        looks.append(1)
        if len(looks) > 2:
            raise WorkerLost("raylet ended")

    connection.check = check
    monkeypatch.setattr("ray.wait", lambda pending, **_: ([], pending))
    with pytest.raises(WorkerLost, match="raylet ended"):
        connection.wait(connection.number, [object()], 3600.0)
    assert len(looks) == 3
