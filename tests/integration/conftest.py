import pytest


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Prefect's home folder for the commands of one module."""
    return tmp_path_factory.mktemp("prefect")
