import pytest

from storage.ownership.lease import acquire
from tests.storage.clocks import Time, elsewhere

SECONDS = 30.0


@pytest.fixture
def moment():
    return Time()


@pytest.fixture
def take(any_root, moment):
    """Acquire with a controlled clock, on every backend."""

    def acquire_as(name, skew=0.0):
        return acquire(any_root, "run", elsewhere(name), SECONDS, moment.clock(skew), moment.pass_by)

    return acquire_as
