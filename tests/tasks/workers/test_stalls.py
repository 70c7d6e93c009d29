"""Calls that stand still are told once, with their place; others are not."""

import threading

import pytest

from tasks.stages.transaction import at_once
from tasks.workers.stalls import STALL_S, Watch, current_stage, within


class Waiting:
    """A call that waits in another thread."""

    def __init__(self, watch: Watch) -> None:
        self.inside, self.end = threading.Event(), threading.Event()
        self._watch = watch
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.inside.wait()

    def _run(self) -> None:
        with within("train of iteration 3"), self._watch.over("train_policy"):
            self.inside.set()
            self.end.wait()

    def stop(self) -> None:
        self.end.set()
        self.thread.join()


@pytest.fixture
def said():
    return []


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def watch(said, now):
    return Watch(said.append, lambda: now[0])


def test_a_call_that_stands_still_is_told_once_with_its_place(watch, said, now):
    waiting = Waiting(watch)
    for _ in range(3):
        watch.look()
    assert said == []
    for _ in range(5):
        now[0] += STALL_S
        watch.look()
    waiting.stop()
    assert said
    assert len(set(said)) == len(said)
    assert said[-1].startswith(f"no progress in train_policy (train of iteration 3) for {STALL_S:.0f} s on host ")
    assert " (wait)" in said[-1]


def test_another_call_in_the_same_place_and_no_call_at_all_are_no_stall(watch, said, now):
    for _ in range(3):
        waiting = Waiting(watch)
        watch.look()
        waiting.stop()
        watch.look()
        now[0] += STALL_S
    assert said == []


def test_calls_that_a_stage_makes_at_once_belong_to_it():
    with within("weight-sync of iteration 3"):
        assert at_once([current_stage] * 2) == ["weight-sync of iteration 3"] * 2
