"""A start that failed before anything was committed does not bind the run's name to its configuration."""

import json
import tomllib
from dataclasses import dataclass

import pytest

from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError, LeaseLost
from storage.manifest import commit
from storage.ownership.lease import hold, unlock
from storage.ownership.process import this_process
from tasks.config.document import apply_override, parse_config
from tasks.config.run import RunConfig
from tasks.config.stored import check_record, read_config, record_config, stored_config
from tasks.importing.rows import ImportOrder
from tasks.importing.samples import import_samples
from tasks.stages.names import Stage
from tests.flows.runs import make_manifest
from tests.storage.conftest import EXAMPLE
from tests.tasks.config.test_run import MINIMAL

KEY = layout.run_config_key("run")


def config_with(*settings: str) -> RunConfig:
    document = tomllib.loads(MINIMAL)
    for setting in settings:
        apply_override(document, setting)
    return parse_config(document, "test")


FIRST, OTHER = config_with(), config_with("rollout.samples=3", "run.iterations=7", "run.seed=5")


@pytest.fixture
def root(tmp_path) -> Root:
    """A root with a run whose start failed before its first manifest."""
    store = open_root(str(tmp_path / "runs"))
    with hold(store, "run", "ratchet run") as lease:
        record_config(store, "run", FIRST, lease)
    return store


def commit_first(root: Root, digest: str) -> None:
    commit(root, make_manifest("run", 0, Stage.PREPARE, config_digest=digest))


def test_its_name_may_be_used_with_another_configuration(root):
    check_record(root, "run", OTHER)
    with hold(root, "run", "ratchet run") as lease:
        digest = record_config(root, "run", OTHER, lease)
    assert read_config(root, "run").digest == digest
    assert stored_config(root, "run").run.iterations == 7
    commit_first(root, digest)
    for check in (check_record, record_config):
        with pytest.raises(InputError, match=r"rollout\.samples: the run was started with 3, but is now given 8"):
            check(root, "run", FIRST)


def test_one_manifest_binds_the_run(root):
    commit_first(root, read_config(root, "run").digest)
    before = root.read_bytes(KEY)
    with hold(root, "run", "ratchet run") as lease, pytest.raises(InputError, match="different settings"):
        record_config(root, "run", OTHER, lease)
    with hold(root, "run", "ratchet run") as lease:
        record_config(root, "run", config_with("run.iterations=9"), lease)
    assert root.read_bytes(KEY) == before


def test_a_later_iteration_binds_the_run_if_the_first_is_lost(root):
    commit(root, make_manifest("run", 1, Stage.ROLLOUT, config_digest=read_config(root, "run").digest))
    before = root.read_bytes(KEY)
    with hold(root, "run", "ratchet run") as lease, pytest.raises(InputError, match="different settings"):
        record_config(root, "run", OTHER, lease)
    assert root.read_bytes(KEY) == before


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "killed"])
def test_imported_samples_never_become_a_run_that_samples(tmp_path, committed):
    """Imported samples begin with iteration 1, and a killed import has a record and no manifests."""
    root = open_root(str(tmp_path / "imports"))
    row = {"prompt_tokens": [1], "response_tokens": [2], "logprobs": [-1.0], "reward": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    import_samples(root, ImportOrder((str(tmp_path / "rows.jsonl"),), "run", {}, 1.0))
    for key in () if committed else root.keys("run/manifests"):
        root.remove(key)
    before = {key: root.read_bytes(key) for key in root.keys("run")}
    with hold(root, "run", "ratchet run") as lease:
        for check in (check_record, lambda *given: record_config(*given, lease)):
            with pytest.raises(InputError, match=r"holds imported samples.* needs another name"):
                check(root, "run", FIRST)
        assert before.items() <= {key: root.read_bytes(key) for key in root.keys("run")}.items()


def test_without_the_lease_nothing_is_replaced(root):
    before = root.read_bytes(KEY)
    with pytest.raises(InputError, match="different settings"):
        record_config(root, "run", OTHER)
    with hold(root, "run", "ratchet run") as lease:
        unlock(root, "run", this_process("another"), force=True)
        with pytest.raises(LeaseLost):
            record_config(root, "run", OTHER, lease)
    assert root.read_bytes(KEY) == before


def test_a_kill_between_the_old_record_and_the_new_one_leaves_a_free_name(root):
    class KilledError(BaseException):
        pass

    @dataclass(frozen=True)
    class Killing(Root):
        def remove(self, key):
            super().remove(key)
            raise KilledError

    killing = Killing(root.url, root.backend)
    with pytest.raises(KilledError), hold(root, "run", "ratchet run") as lease:
        record_config(killing, "run", OTHER, lease)
    assert not root.exists(KEY)
    check_record(root, "run", FIRST)
    with hold(root, "run", "ratchet run") as lease:
        assert record_config(root, "run", FIRST, lease) == read_config(root, "run").digest


def test_a_record_that_was_replaced_too_late_gives_way_to_that_of_the_manifests(root, tmp_path):
    """A holder that froze just before it replaced the record continues after its successor has committed."""
    commit_first(root, read_config(root, "run").digest)
    root.remove(KEY)
    record = open_root(f"{EXAMPLE}://{tmp_path}/late.db")
    record_config(record, "run", OTHER)
    root.put_if_absent(KEY, record.read_bytes(KEY))
    with hold(root, "run", "ratchet run") as lease:
        with pytest.raises(InputError, match="belongs to configuration"):
            record_config(root, "run", OTHER, lease)
        check_record(root, "run", FIRST)
        digest = record_config(root, "run", FIRST, lease)
    assert read_config(root, "run").digest == digest


def test_the_record_has_the_name_that_the_run_was_started_under(root):
    """`--run` and `run.name` are the same setting."""
    record_config(root, "a", config_with())
    record_config(root, "b", config_with("run.name=b"))
    record_config(root, "c", config_with("run.name=other"))
    assert [stored_config(root, name).run.name for name in "abc"] == ["a", "b", "c"]
    assert stored_config(root, "a").model_copy(update={"run": None}) == stored_config(root, "b").model_copy(
        update={"run": None}
    )
