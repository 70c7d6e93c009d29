"""`ratchet rm` and `ratchet stop` as commands."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.cli import upkeep
from flows.cli.app import execute
from storage.backends.root import Root
from storage.errors import InputError
from storage.ownership.lease import acquire, end_holder, holder
from storage.ownership.process import this_process
from storage.upkeep.verify import verify
from tests.flows.runs import MakeRun
from tests.storage.clocks import elsewhere

PROJECT = Path(__file__).resolve().parents[3]
HOLDER = """
import sys, time
from storage.backends.root import open_root
from storage.ownership.lease import hold
from flows.cli.signals import Signals
with Signals():
    try:
        with hold(open_root(sys.argv[1]), "a", "ratchet run"):
            print("held", flush=True)
            time.sleep(600)
    except KeyboardInterrupt:
        print("released", flush=True)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def driving(make_run: MakeRun, root: Root):
    """A process that drives run `a`, started as a shell starts one in the background: with SIGINT ignored."""
    make_run("a", 1)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, root.url],
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_rm_asks_and_removes(make_run: MakeRun, root: Root, monkeypatch, capfd):
    make_run("a", 1)
    make_run("b", 1)
    command = ["rm", "a", "--root", root.url]
    assert execute(command) == 2
    assert "asks before it removes anything, but not in a pipe or a job: give --yes" in capfd.readouterr().err
    monkeypatch.setattr(upkeep.sys, "stdin", Terminal("n\n"))
    assert execute(command) == 1
    assert "nothing was removed" in capfd.readouterr().err
    assert verify(root, "a").sound
    monkeypatch.setattr(upkeep.sys, "stdin", Terminal("y\n"))
    assert execute(command) == 0
    assert "remove 10 objects" in capfd.readouterr().err
    assert root.folders() == ["b"]
    assert execute(["rm", "b", "--root", root.url, "--yes", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["objects"] == 11  # and an entry of the lease
    assert root.folders() == []


def test_rm_leaves_a_run_that_is_driven(driving, root: Root, capfd):
    assert execute(["rm", "a", "--root", root.url, "--yes"]) == 2
    assert "Wait for it or end it" in capfd.readouterr().err
    assert verify(root, "a").sound


def test_stop_ends_the_process_that_drives_the_run(driving, root: Root, capfd):
    assert execute(["stop", "a", "--root", root.url, "--json"]) == 0
    stopped = json.loads(capfd.readouterr().out)
    assert stopped == {"run": "a", "process": driving.pid, "ended": True, "released": None}
    assert driving.stdout.read() == "released\n"
    assert holder(root, "a") is None
    assert execute(["stop", "a", "--root", root.url]) == 0
    assert "run a: no process drives it" in capfd.readouterr().out


def test_stop_says_so_if_the_process_does_not_end(driving, root: Root, monkeypatch, capfd):
    psutil.Process(driving.pid).suspend()
    monkeypatch.setattr(upkeep, "_WAIT_S", 0.2)
    assert execute(["stop", "a", "--root", root.url]) == 1
    fact = f"process {driving.pid}, which drives run a, has not ended within 0.2 s: `kill -9 {driving.pid}` ends it"
    assert fact in capfd.readouterr().out


def test_stop_refuses_a_process_of_another_machine(make_run: MakeRun, root: Root):
    make_run("a", 1)
    acquire(root, "a", elsewhere("ratchet run"))
    with pytest.raises(InputError, match=r"driven by ratchet run \(host elsewhere, process 7\), which cannot be seen"):
        end_holder(root, "a", 1)


def test_what_a_dead_process_has_left_is_free(make_run: MakeRun, root: Root):
    make_run("a", 1)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    acquire(root, "a", this_process("ratchet run").model_copy(update={"process": dead.pid, "birth": "1"}))
    assert end_holder(root, "a", 1) == (None, True)
