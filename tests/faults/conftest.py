import pytest

from tests.faults.running import Launcher, SmallRun


@pytest.fixture(scope="session")
def launcher():
    server = Launcher()
    yield server
    server.close()


@pytest.fixture(scope="session")
def whole(launcher, tmp_path_factory):
    """A run that nothing interrupts: its actions, and its stored results."""
    run = SmallRun(launcher, tmp_path_factory.mktemp("whole") / "run")
    attempt = run.attempt()
    assert attempt.code == 0, attempt.messages
    return attempt, run.look()
