"""The first signal ends a command cleanly, another one at once; the exit code follows the shell's convention."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flows.cli.signals import Signals

PROJECT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("default_signals")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_interrupts_and_says_so(number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]):
    before = signal.getsignal(number)
    signals = Signals()
    with signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), other)  # at the same moment, as a closing terminal and its shell do
    assert signals.exit_code == code
    assert signal.getsignal(number) == before
    said = capfd.readouterr().err
    assert said == (
        f"ratchet: {number.name}: ending within 90 s. Another signal ends it at once. Nothing that was committed is "
        "lost\n"
    )


def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


CLEARING_UP = """
import sys, time
from flows.cli.signals import Signals
with Signals(float(sys.argv[1])):
    try:
        sys.stdout.write("working\\n"); sys.stdout.flush()
        while True:
            time.sleep(0.1)  # a signal that comes just before the system call does not end it
    finally:
        sys.stdout.write("clearing up\\n"); sys.stdout.flush()
        time.sleep(float(sys.argv[2]))
        sys.stdout.write("cleared up\\n"); sys.stdout.flush()
"""


def start(limit: float, clearing: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CLEARING_UP, str(limit), str(clearing)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PROJECT)
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_further_signal_ends_it_at_once(number: signal.Signals, code: int):
    process = start(600, 600)
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == "clearing up\n"
    time.sleep(1.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1].startswith("ratchet: another signal: ended at once. Nothing that was committed is lost")


def test_an_end_that_takes_too_long_is_cut_short():
    process = start(0.5, 600)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "clearing up\n")
    assert "ending took longer than 0.5 s: ended at once" in err


def test_an_end_in_time_is_not_cut_short():
    process = start(600, 0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "clearing up\ncleared up\n"
    assert "KeyboardInterrupt" in err


def test_nothing_watches_when_it_is_over():
    with Signals():
        assert "signals" in {thread.name for thread in threading.enumerate()}
    deadline = time.monotonic() + 30
    while "signals" in {thread.name for thread in threading.enumerate()}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
