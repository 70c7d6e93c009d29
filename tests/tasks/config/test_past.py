"""A run continues from manifests of its own configuration only."""

import tomllib

import pytest

from storage import layout, records
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.upkeep.fork import fork
from tasks.config.document import parse_config
from tasks.config.run import RunConfig
from tasks.config.stored import ConfigRecord, record_config
from tasks.stages.names import WORKFLOW
from tests.storage.runs import DOCUMENT, make_run
from tests.tasks.config.test_run import MINIMAL

KEY = layout.run_config_key("child")


@pytest.fixture
def config() -> RunConfig:
    return parse_config(tomllib.loads(MINIMAL), "test")


@pytest.fixture
def root(tmp_path) -> Root:
    """A root with a complete run, and a fork under another configuration that was killed before its `run.json`."""
    store = open_root(str(tmp_path / "runs"))
    make_run(store, "parent", 2)
    fork(store, WORKFLOW, "parent", 1, "child", "of another one", DOCUMENT)
    store.remove(KEY)
    return store


def test_a_fork_that_was_killed_is_not_the_past_of_a_new_run(root, config):
    with pytest.raises(InputError, match=r"a fork that was interrupted\. Complete it with"):
        record_config(root, "child", config)
    assert not root.exists(KEY)
    record_config(root, "other", config)


def test_a_run_that_an_earlier_version_let_begin_there_is_not_continued(root, config):
    records.publish(root, KEY, ConfigRecord.of(config))
    with pytest.raises(InputError, match=r"taken from run parent\) belongs to configuration of another one, but"):
        record_config(root, "child", config)


def test_a_fork_that_was_completed_is_continued(root, config):
    record = ConfigRecord.of(config)
    fork(root, WORKFLOW, "parent", 1, "whole", record.digest, record)
    assert record_config(root, "whole", config) == record.digest
