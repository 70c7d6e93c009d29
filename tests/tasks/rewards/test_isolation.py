"""Faults of a reward function affect its own sample alone, are recorded with their reason, and leave nothing."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from storage.errors import StageFailed
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.environment import site_mark
from tasks.rewards.pool import score_in_processes
from tests.tasks.rewards.orders import HELPERS, order, responses, scores

MARK, _ = site_mark(Path())  # a scoring process inherits it
DEADLINE_S = 6  # long enough for a busy machine if nothing hangs

FAILING = {
    "raise": ("exception", r"KeyError: 'answer' \(misbehaving.py, line \d+\)"),
    "raise without text": ("exception", "NoText"),
    "interrupt": ("exception", "KeyboardInterrupt"),
    "sys.exit": ("exit", "SystemExit: enough"),
    "os._exit": ("exit", "ended with code 3"),
    "kill": ("exit", "ended by signal SIGKILL"),
    "kill the group": ("exit", "ended by signal SIGKILL"),
    "real-time signal": ("exit", "ended by signal 40"),
    "segfault": ("exit", "ended by signal SIGSEGV"),
    "hang": ("timeout", f"no score within {DEADLINE_S} s"),
    "hang deaf": ("timeout", f"no score within {DEADLINE_S} s"),
    "print and hang": ("timeout", f"no score within {DEADLINE_S} s"),
    "close": ("exit", "ended with code 0"),
    "kill the keeper": ("exit", "scoring process ended with code -9"),
}
FINE = ("nothing", "print", "fork", "forget", "read", "daemon", "child", "threads")


@pytest.fixture
def marked(monkeypatch):
    """Name the processes that were started since, by a mark in their environment."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)

    def find() -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                    found.append(process.name())
            except psutil.Error:
                continue
        return found

    return find


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_what_a_function_does_happens_to_its_sample_alone(processes, marked):
    before = Path.cwd(), dict(os.environ), signal.getsignal(signal.SIGCHLD)
    asked = [one for bad in FAILING for one in (bad, "nothing")] + [*FINE, "nothing"]
    given = order(f"{HELPERS}:behaving", deadline_s=DEADLINE_S, start_deadline_s=float(DEADLINE_S))
    found = list(zip(asked, scores(given, asked, processes=processes), strict=True))
    for name, score in found:
        if name in FAILING:
            reason, detail = FAILING[name]
            assert (score.reward, score.reason) == (None, reason), (name, score)
            assert score.status == ("timeout" if reason == "timeout" else "error")
            assert re.search(detail, score.detail), (name, score)
            assert len(score.detail) < 1200
        else:
            assert (score.reward, score.status, score.detail) == (1.0, "ok", ""), (name, score)
    assert before == (Path.cwd(), dict(os.environ), signal.getsignal(signal.SIGCHLD))
    assert marked() == []


def test_a_death_after_the_answer_does_not_count_for_the_next_sample():
    found = scores(order(f"{HELPERS}:behaving"), ["die later", "slow", "slow"])
    assert [score.reward for score in found] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("loses", ["os.kill(os.getppid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_process_that_somebody_ends_or_stops_costs_no_sample(tmp_path, loses):
    (tmp_path / "own.py").write_text(
        "import os, signal\nfrom pathlib import Path\ndef f(record, response):\n"
        f"  lost = Path({str(tmp_path / 'lost')!r})\n  if not lost.exists():\n    lost.touch()\n    {loses}\n"
        "  return float(response)"
    )
    found = scores(order(f"{tmp_path}/own.py:f", deadline_s=1.0, start_deadline_s=4.0), ["1", "2"])
    assert [score.reward for score in found] == [1.0, 2.0]


def test_a_function_that_forks_answers_once(tmp_path):
    (tmp_path / "own.py").write_text("import os\ndef f(record, response):\n  os.fork()\n  return float(response)")
    assert [score.reward for score in scores(order(f"{tmp_path}/own.py:f"), list("12345"))] == [1, 2, 3, 4, 5]


def test_words_before_a_death_are_kept(tmp_path):
    (tmp_path / "own.py").write_text(
        "import os\ndef f(record, response):\n  print('out of luck', flush=True)\n  os._exit(9)"
    )
    (score,) = scores(order(f"{tmp_path}/own.py:f"), ["x"])
    assert score.detail == "its process ended with code 9; it said last: out of luck"


LAZY = """
import os
import time

loaded = []

def score(record, response):
    if response == "early":
        raise KeyError("before anything is loaded")
    if response == "quick":
        return 0.5
    if not loaded:
        time.sleep(2)
        loaded.append("a model")
    if response == "die":
        os._exit(1)
    return 1.0
"""


@pytest.mark.slow
def test_what_the_first_call_loads_is_charged_to_no_sample_also_after_a_restart(tmp_path):
    (tmp_path / "lazy.py").write_text(LAZY)
    found = scores(order(f"{tmp_path}/lazy.py:score", deadline_s=1.5), ["early", "quick", "a", "b", "die", "c"])
    assert [score.reward for score in found] == [None, 0.5, 1.0, 1.0, None, 1.0]
    assert [score.reason for score in found] == ["exception", None, None, None, "exit", None]


@pytest.mark.slow
def test_a_function_that_always_hangs_has_less_and_less_time_beyond_its_deadline():
    given = order(f"{HELPERS}:behaving", deadline_s=0.25, start_deadline_s=2.0)
    found = [score.detail for score in scores(given, ["hang"] * 3)]
    said = "no score within 0.25 s, nor within {} s more, which the first calls of a process have"
    assert found == [said.format(more) for more in (2, 1, 0.5)]


OWNER = """
import sys
from tests.tasks.rewards.orders import *
scores(order(f"{HELPERS}:behaving", deadline_s=600), ["daemon", "child", sys.argv[1]])
"""


def wait_for(fact):
    until = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("last", ["hang", "hang deaf"])
def test_nothing_is_left_when_the_run_is_killed(marked, last):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, last], cwd=PROJECT_ROOT)
    wait_for(lambda: "sleep" in marked())
    assert len(marked()) >= 5  # itself, worker, scorer, daemon, child
    owner.kill()
    owner.wait()
    wait_for(lambda: marked() == [])


@pytest.mark.usefixtures("default_signals")
def test_an_interruption_ends_the_scoring_at_once(marked):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, "hang"], cwd=PROJECT_ROOT, stderr=subprocess.PIPE)
    wait_for(lambda: "sleep" in marked())
    owner.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in owner.communicate(timeout=30)[1]
    assert marked() == []


def test_a_function_that_cannot_be_imported_fails_the_stage():
    with pytest.raises(StageFailed, match=r"'no\.such\.module:f' cannot be used: ModuleNotFoundError: No module"):
        scores(order("no.such.module:f"), ["x"])


CHANGING = """
import os
from pathlib import Path

def f(record, response):
    if response == "change":
        Path(__file__).write_text(Path(__file__).read_text().replace("return 1", "return 2"))
        os._exit(1)
    return 1
"""


def test_a_file_that_changes_while_it_scores_is_not_mixed(tmp_path, monkeypatch):
    """Each process reads a module again; all processes run the same text of a file named by its path."""
    (tmp_path / "changing.py").write_text(CHANGING)
    by_path = scores(order(f"{tmp_path}/changing.py:f"), ["x", "change", "x"])
    assert [score.reward for score in by_path] == [1.0, None, 1.0]
    (tmp_path / "changing.py").write_text(CHANGING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StageFailed, match="its file has changed while the stage was scoring"):
        scores(order("changing:f"), ["x", "change", "x"])


def test_scoring_ends_once_too_many_have_failed():
    found = score_in_processes(order(f"{HELPERS}:crashing"), responses(["raise"] * 20), 1, allowed=2).scores
    assert [score is not None for score in found] == [True] * 3 + [False] * 17
