"""Failures of a member of a group of actors.

The actors hold objects of the standard library and of storage, so that each starts in a second.
"""

import collections
import errno
import gc
import logging
import operator
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from storage.backends.root import open_root
from storage.errors import NotCommitted, WorkerLost
from tasks.workers.actors import ObservedGroup, WorkerGroup, find_groups, fresh_names, lacks_memory, spawn
from tasks.workers.silence import Silence
from tasks.workers.stalls import within

WAIT_S = 120.0


@pytest.fixture
def make_group(cluster_of_group):
    groups = []

    def make(factory, arguments, prefix="test", detached=False):
        names = fresh_names(prefix, len(arguments))
        group = WorkerGroup(
            [f"member {place}" for place in range(len(names))], spawn(names, [{}] * len(names), detached)
        )
        group.start(factory, arguments, WAIT_S)
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.end()


@pytest.mark.slow
def test_every_member_is_called_in_order(make_group):
    group = make_group(collections.deque, [([1, 2],), ([3],)])
    group.submit("append", 9).wait(WAIT_S)
    assert group.submit("pop").wait(WAIT_S) == [9, 9]
    assert group.submit("pop").wait(WAIT_S) == [2, 3]
    assert group.alive()


@pytest.mark.slow
def test_an_error_of_ours_that_all_members_raise_leaves_the_group_alive(make_group, tmp_path):
    url = f"file://{tmp_path}"
    group = make_group(open_root, [(url,), (url,)])
    with pytest.raises(NotCommitted, match=r"member 0: .*/nothing is not there"):
        group.submit("read_bytes", "nothing").wait(WAIT_S)
    assert group.submit("exists", "nothing").wait(WAIT_S) == [False, False]


@pytest.mark.slow
def test_members_that_are_out_of_step_are_ended(make_group, tmp_path):
    (tmp_path / "key").write_text("here")
    group = make_group(open_root, [(f"file://{tmp_path}",), (f"file://{tmp_path}/other",)])
    with pytest.raises(NotCommitted, match="member 1"):
        group.submit("read_bytes", "key").wait(WAIT_S)
    assert not group.alive()
    with pytest.raises(WorkerLost, match="next attempt"):
        group.submit("exists", "key").wait(WAIT_S)


@pytest.mark.slow
def test_members_that_end_differently_are_kept_if_the_call_changes_nothing(make_group, tmp_path):
    """Only ranks that still send weights notice a failure."""
    (tmp_path / "key").write_text("here")
    group = make_group(
        lambda url: SimpleNamespace(send_weights=open_root(url).read_bytes),
        [(f"file://{tmp_path}",), (f"file://{tmp_path}/other",)],
    )
    with pytest.raises(NotCommitted, match="member 1"):
        group.submit("send_weights", "key").wait(WAIT_S)
    assert group.alive()
    with pytest.raises(NotCommitted, match="member 0"):
        group.submit("send_weights", "nothing").wait(WAIT_S)


@pytest.mark.slow
def test_an_error_that_is_none_of_ours_ends_the_group_and_tells_where_it_came_from(make_group):
    group = make_group(collections.deque, [([],)])
    with pytest.raises(
        WorkerLost, match=r"member 0 failed in pop on host \S+ and was ended: IndexError: pop from an empty deque"
    ) as lost:
        group.submit("pop").wait(WAIT_S)
    assert any("tasks/workers/actors.py" in note for note in lost.value.__notes__)
    assert not group.alive()


@pytest.mark.slow
def test_an_object_that_cannot_be_made_is_told_by_the_first_call_alone(make_group, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)
    call = make_group(open_root, [("nonsense://x",)]).submit("exists", "key")
    with pytest.raises(Exception, match="member 0: storage root 'nonsense://x'"):
        call.wait(WAIT_S)
    call._group.processes()  # answers once the call has ended
    del call
    gc.collect()
    assert caplog.messages == []  # Ray logs an error that nobody has asked for


@pytest.mark.slow
def test_a_death_is_told_before_the_errors_it_caused(make_group):
    # "exit" of the first member ends its process; the second raises an error of its own
    group = make_group(operator.attrgetter, [("_exit",), ("missing",)])
    with pytest.raises(WorkerLost, match=r"member 0 died during __call__ on host \S+ \("):
        group.submit("__call__", ExitModule()).wait(WAIT_S)
    assert not group.alive()


class ExitModule:
    """An object like a module to `attrgetter`; reading `_exit` ends the process that reads it."""

    def __getattr__(self, name):
        import os

        if name == "_exit":
            os._exit(3)
        raise ValueError(name)


@pytest.mark.slow
def test_a_later_process_finds_detached_groups_in_step_only(make_group, cluster_of_group):
    group = make_group(collections.deque, [([1],), ([2],)], prefix="run-a/role/key", detached=True)
    make_group(collections.deque, [([1],)], prefix="run-b/role/key", detached=True)
    group.submit("append", 7).wait(WAIT_S)
    ((name, actors),) = find_groups("run-a/role").items()
    assert name.startswith("run-a/role/key/")
    found = WorkerGroup(["first", "second"], actors)
    assert found.in_step()
    assert found.submit("pop").wait(WAIT_S) == [7, 7]
    found._actors[0].call.remote("", "append", 1)  # the flow process might have died between two members
    assert not found.in_step()


def test_who_only_asks_ends_nobody(make_group):
    group = make_group(collections.deque, [([1],)])
    asking = ObservedGroup.found("run-a/role", ["other"], group._actors)
    with pytest.raises(WorkerLost):
        asking.submit("no_such_method").wait(WAIT_S)
    assert not asking.alive()
    assert group.alive()
    assert group.submit("pop").wait(WAIT_S) == [1]


@pytest.mark.slow
def test_a_call_that_takes_too_long_ends_the_group(make_group):
    group = make_group(operator.attrgetter, [("sleep",), ("sleep",)])
    with pytest.raises(WorkerLost, match=r"did not finish __call__ within 0.5 s and was ended.*call_deadline_s"):
        group.submit("__call__", SlowModule()).wait(0.5)
    assert not group.alive()


class Spinning:
    """Computes until a file is there."""

    def spin(self, path):
        while not Path(path).exists():
            pass


@pytest.mark.slow
def test_a_frozen_member_is_told_once_with_its_host_and_call(make_group, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("tasks.workers.actors.SILENCE", silence := Silence(told.append))
    group = make_group(Spinning, [(), ()])
    frozen = psutil.Process(group.processes()[1])
    with within("train of iteration 3"), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(copy_context().run, lambda: group.submit("spin", f"{tmp_path}/end").wait(WAIT_S))
        time.sleep(1)  # both have begun
        frozen.suspend()
        try:
            for _ in range(3):
                silence.look()
                time.sleep(0.5)
        finally:
            frozen.resume()
            (tmp_path / "end").touch()
        waiting.result()
    (line,) = told
    assert re.match(rf"member 1 on host \S+ stands still in spin \(train of iteration 3\): process {frozen.pid} ", line)


@pytest.mark.slow
def test_two_calls_are_at_work_at_once(make_group, tmp_path):
    reader, writer = (make_group(operator.attrgetter, [(name,)]) for name in ("read", "write"))
    meeting = Meeting(str(tmp_path / "pipe"))
    pending = reader.submit("__call__", meeting)  # waits for the other side
    assert writer.submit("__call__", meeting).wait(WAIT_S) == [7]
    assert pending.wait(WAIT_S) == [b"weights"]


class SlowModule:
    """An object like a module to `attrgetter`; reading `sleep` takes longer than any deadline."""

    def __getattr__(self, name):
        import time

        return time.sleep(600)


class Meeting:
    """A transfer whose two sides must work at once: opening one end of a named pipe waits for the other."""

    def __init__(self, path):
        os.mkfifo(path)
        self._path = path

    @property
    def read(self):
        return Path(self._path).read_bytes()

    @property
    def write(self):
        return Path(self._path).write_bytes(b"weights")


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error."""


class AcceleratorError(RuntimeError):
    def __init__(self, code: int) -> None:
        super().__init__("CUDA error")
        self.error_code = code


@pytest.mark.parametrize(
    ("cause", "lacks"),
    [
        (MemoryError(), True),
        (type("ArrayMemoryError", (MemoryError,), {})("array"), True),  # of numpy
        (OutOfMemoryError("CUDA out of memory"), True),
        (AcceleratorError(2), True),
        (AcceleratorError(700), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "out of memory.txt"), False),
        (RuntimeError("the answer was: out of memory"), False),
        (KeyError("memory"), False),
    ],
)
def test_a_lack_of_memory_is_known_by_type_or_code_and_not_by_words(cause: BaseException, lacks: bool):
    assert lacks_memory(cause) is lacks


class Terminated(BaseException):
    """As Prefect's handler of SIGTERM raises it."""


@pytest.mark.parametrize("cause", [Terminated(), None], ids=["signal", "fault"])
def test_a_signal_that_ends_a_wait_for_a_member_is_no_fault_of_ray(monkeypatch, cause):
    def interrupted(*_, **__):
        raise SystemError("returned a result with an exception set") from cause

    monkeypatch.setattr("ray.wait", interrupted)
    with pytest.raises(Terminated if cause else SystemError):
        WorkerGroup(["member 0"], [None]).gather([object()], "train", WAIT_S)
