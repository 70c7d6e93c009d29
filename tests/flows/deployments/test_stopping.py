"""`ratchet stop` of a flow run."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.deployments.attempt import Stopped, stoppable
from storage.backends.root import open_root
from storage.ownership.lease import ASKED_FOR, STOP_SIGNAL, end_holder, hold


@pytest.fixture
def deaf_to_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("deaf_to_sigterm")
def test_a_flow_run_is_ended_by_a_signal_of_its_own(tmp_path: Path):
    root = open_root(str(tmp_path))
    with hold(root, "a", f"{ASKED_FOR}b"), pytest.raises(Stopped), stoppable():
        end_holder(root, "a", 0.1)
    assert signal.getsignal(STOP_SIGNAL) == signal.SIG_DFL


@pytest.mark.usefixtures("deaf_to_sigterm")
def test_a_command_is_ended_by_sigterm(tmp_path: Path):
    root = open_root(str(tmp_path))
    with hold(root, "a", "ratchet run"), stoppable():
        assert not end_holder(root, "a", 0.1)[1]  # it ignores the signal
