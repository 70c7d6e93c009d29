"""Signals end a command once, with the exit code that a shell expects."""

import os
import signal

import pytest

from flows.cli.signals import Signals

pytestmark = pytest.mark.usefixtures("default_signals")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_interrupts_and_later_ones_do_not(number: signal.Signals, code: int):
    before = signal.getsignal(number)
    signals = Signals()
    with signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), other)
    assert signals.exit_code == code
    assert signal.getsignal(number) == before


def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_that_somebody_replaced_is_taken_back():
    with Signals() as signals:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.take()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
