"""A run keeps the configuration it was started with; a record of it that was damaged is refused."""

import json
import tomllib

import pytest

from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import DigestMismatch, InputError, SchemaMismatch
from storage.upkeep.verify import Problem, verify
from tasks.config.run import RunConfig, parse_config
from tasks.config.stored import record_config, stored_config
from tests.tasks.config.test_run import MINIMAL

KEY = layout.run_config_key("run")


@pytest.fixture
def config() -> RunConfig:
    return parse_config(tomllib.loads(MINIMAL), "test")


@pytest.fixture
def root(tmp_path) -> Root:
    return open_root(str(tmp_path / "runs"))


def test_it_reads_back_equal(root, config):
    record_config(root, "run", config)
    assert stored_config(root, "run") == config
    record_config(root, "run", config)


def test_another_meaning_is_refused(root, config):
    record_config(root, "run", config)
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"samples": 3})})
    with pytest.raises(InputError, match=r"rollout\.samples: the run was started with 8, now 3 is given"):
        record_config(root, "run", other)
    assert stored_config(root, "run") == config


def test_an_unknown_run(root):
    with pytest.raises(InputError, match="there is no run 'never'"):
        stored_config(root, "never")


def test_each_flipped_bit_is_refused_with_the_key(config):
    root = open_root("memory://flipped", allow_memory=True)
    record_config(root, "run", config)
    good = root.read_bytes(KEY)
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 1 << position % 8
        root.replace(KEY, bytes(damaged))
        with pytest.raises(DigestMismatch, match=KEY):
            stored_config(root, "run")
        assert [(one.fault, one.key) for one in verify(root, "run").findings] == [(Problem.DAMAGED, KEY)]


def test_a_record_of_an_earlier_version_is_read(root, config):
    document = config.model_dump(mode="json", exclude={"storage"})  # from before there was retention, and unsealed
    root.put_if_absent(KEY, json.dumps(document, indent=1).encode())
    assert stored_config(root, "run") == config
    record_config(root, "run", config)


def test_a_record_that_this_version_cannot_read_is_refused(root, config):
    document = {**config.model_dump(mode="json"), "later": 1}
    root.put_if_absent(KEY, json.dumps(document).encode())
    with pytest.raises(SchemaMismatch, match="later"):
        stored_config(root, "run")
