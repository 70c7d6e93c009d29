"""Names of what stands still: once, with host, call and a repair."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from storage.errors import WorkerLost
from tasks.workers.connection import CONNECTION
from tasks.workers.silence import Silence, Wait, Where
from tasks.workers.stalls import within

RANKS = {Where("a", "host-a", 1): "rank 0", Where("b", "host-b", 2): "rank 1"}
ENGINE = {Where("a", "host-a", 3): "engine 0"}
WAITS = (("train (train of iteration 3)", RANKS), ("collect (rollout of iteration 4)", ENGINE))
SILENT = WorkerLost("host 10.0.0.2 does not answer")


@pytest.fixture
def told():
    return []


def test_a_look_asks_once_for_all_waits_and_names_what_cannot_be_seen_once(told):
    asked = []

    def spent(places):
        asked.append(places)
        return {place: SILENT if place.node == "b" else float(len(asked)) for place in places}

    silence = Silence(told.append, spent)
    with ExitStack() as waiting:
        for what, members in WAITS:
            waiting.enter_context(silence.over(Wait(what, CONNECTION.number, members.copy)))
        silence.look()
        silence.look()
    assert asked == [{*RANKS, *ENGINE}] * 2
    (line,) = told
    assert line.startswith(f"rank 1 on host host-b cannot be seen in {WAITS[0][0]}: {SILENT}; let ")


def test_a_process_below_this_one_that_a_signal_stops_is_named_each_time(told):
    silence = Silence(told.append)
    command = [sys.executable, "-c", "input()", "tasks.rewards.worker", "secret"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child, within("reward of iteration 3"):
        for sent in (None, signal.SIGSTOP, None, signal.SIGCONT, signal.SIGSTOP):
            if sent:
                os.kill(child.pid, sent)
                os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WCONTINUED)
            silence.look_below()
        child.kill()
    first, again = told
    assert first == again
    assert first.startswith(f"process {child.pid} (tasks.rewards.worker) on host ")
    assert "stands still in reward of iteration 3:" in first
    assert f"kill -CONT {child.pid}" in first
