import pytest

from tests.integration.command import PIECES, run_tiny


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """Prefect's home folder for the commands of the tests."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def whole(tmp_path_factory, home):
    """A run of two iterations at one rank, on files and never interrupted."""
    root = tmp_path_factory.mktemp("whole")
    done = run_tiny(root, home, *PIECES)
    assert done.code == 0, done.err
    return root, done
