import uuid

import pytest

from storage.backends.root import open_root
from tests.storage.forks import Forks
from tests.storage.s3 import s3_server

EXAMPLE = "infra/examples/backend.py:SQLite"


@pytest.fixture(scope="session")
def forks():
    """Starts of `tests.storage.worker`."""
    server = Forks("tests.storage.worker")
    yield server
    server.close()


@pytest.fixture
def root(tmp_path):
    """Local files."""
    return open_root(str(tmp_path / "runs"))


@pytest.fixture(scope="session")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture
def s3_root(s3):
    """S3 semantics over a socket; each test has its own prefix."""
    s3.fail_next([])
    s3.faults.away = s3.faults.ceph = False
    return s3.root(uuid.uuid4().hex)


@pytest.fixture(params=["file", "s3", "sqlite"])
def any_root(request, tmp_path):
    """Each backend in turn."""
    if request.param == "s3":
        return request.getfixturevalue("s3_root")
    if request.param == "sqlite":
        return open_root(f"{EXAMPLE}://{tmp_path}/runs.db")
    return open_root(str(tmp_path / "runs"))
