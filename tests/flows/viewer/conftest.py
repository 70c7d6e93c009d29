"""Stored runs that the tests of the viewer look at."""

import pytest

from storage.backends.root import Root, open_root
from tests.small.config import small_config
from tests.small.driving import driver


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A root with two runs that differ in one setting; the second is named so that it comes last."""
    folder = tmp_path_factory.mktemp("viewed")
    store = open_root(str(folder / "runs"))
    driver(store, small_config(), folder / "one").drive()
    driver(store, small_config(["train.optimizer.learning_rate=1e-2"]), folder / "two", run="two").drive()
    return store
