"""What is fetched for the trainer ranks: all of a state, or of its files those alone that its weights need."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from storage.backends.root import Root, open_root
from storage.errors import PartMissing
from storage.manifest import Manifest, Origin, commit
from storage.parts import PartWriter
from tasks.config.run import parse_config
from tasks.stages.context import RunContext
from tasks.stages.held_state import STATE, ensure_reference, ensure_state
from tasks.stages.names import Stage
from tests.storage.tables import manifest
from tests.tasks.config.test_run import MINIMAL
from trainer_core.config import OptimizerConfig

OTHER = OptimizerConfig(learning_rate=0.25)
WEIGHTS = {".metadata": 3_000, "__0_0.distcp": 100_000, "__1_0.distcp": 100_000, "trainer.json": None}
OPTIMIZER = {"optimizer.__0_1.distcp": 300_000, "optimizer.__1_1.distcp": 300_000}


class Group:
    """Ranks that hold nothing, and keep in mind what they were given."""

    def __init__(self) -> None:
        self.given: dict[str, dict[str, int]] = {}
        self.fresh: bool | None = None

    def identity(self) -> None:
        return None

    def reference(self) -> None:
        return None

    def call(self, method: str, *arguments: Any) -> None:
        if method.startswith("load"):
            self.given[method] = {path.name: path.stat().st_size for path in Path(arguments[0]).iterdir()}
        if method == "load":
            self.fresh = arguments[1]


class Fleet:
    """Stands for `tasks.workers.fleet.Fleet`."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def warm(self, *_: object) -> None:
        pass

    def trainers(self, *_: object) -> Group:
        return self.group


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_root(str(tmp_path / "runs"))


@pytest.fixture
def context(root: Root, tmp_path: Path) -> RunContext:
    config = parse_config(tomllib.loads(f"{MINIMAL}\n[train.policy]\nkl_coefficient = 0.1\n"), "test")
    return RunContext("run", root, config, Fleet(Group()), tmp_path / "scratch")


@pytest.fixture
def prepared(root: Root) -> Manifest:
    part = PartWriter(root, "run", 0, Stage.PREPARE).write_bytes("model/config.json", b"{}")
    return commit(root, manifest(Stage.PREPARE, 0, (part,)))


def state(root: Root, optimizer: OptimizerConfig, files: dict[str, int | None], **fields: Any) -> Manifest:
    writer = PartWriter(root, "run", 0, Stage.TRAIN)
    facts = json.dumps({"optimizer": optimizer.model_dump()}).encode()
    parts = [
        writer.write_bytes(name, facts if size is None else name.encode().ljust(size, b"."))
        for name, size in files.items()
    ]
    named = tuple(part.model_copy(update={"name": STATE + part.name}) for part in parts)
    return commit(root, manifest(Stage.TRAIN, 0, named, **fields))


def of_a_fork(root: Root, optimizer: OptimizerConfig) -> Manifest:
    origin = Origin(run="parent", digest="d", config_digest="c")
    return state(root, optimizer, {**WEIGHTS, **OPTIMIZER}, origin=origin)


def test_a_reference_is_fetched_without_the_optimizer(context, prepared):
    stored = state(context.root, OTHER, {**WEIGHTS, **OPTIMIZER})
    group = context.fleet.group
    ensure_reference(context, prepared, group)
    found = group.given["load_reference"]
    assert found.keys() == WEIGHTS.keys()
    assert sum(found.values()) < 0.3 * sum(part.bytes for part in stored.parts)
    assert not list(context.scratch.glob("load-*"))


def test_a_fork_with_another_optimizer_fetches_the_weights_alone(context, prepared):
    ensure_state(context, prepared, of_a_fork(context.root, OTHER))
    assert context.fleet.group.fresh is True
    assert context.fleet.group.given["load"].keys() == WEIGHTS.keys()


@pytest.mark.parametrize("forked", [True, False])
def test_a_state_is_fetched_as_a_whole(context, prepared, forked):
    optimizer = context.config.train.optimizer
    files = {**WEIGHTS, **OPTIMIZER}
    stored = of_a_fork(context.root, optimizer) if forked else state(context.root, OTHER, files)
    ensure_state(context, prepared, stored)
    assert context.fleet.group.fresh is False
    assert context.fleet.group.given["load"].keys() == files.keys()


def test_of_a_state_of_mixed_files_all_are_fetched(context, prepared):
    state(context.root, OTHER, WEIGHTS)
    ensure_reference(context, prepared, context.fleet.group)
    assert context.fleet.group.given["load_reference"].keys() == WEIGHTS.keys()


def test_a_lost_optimizer_does_not_keep_from_a_reference(context, prepared):
    stored = state(context.root, OTHER, {**WEIGHTS, **OPTIMIZER})
    for name in OPTIMIZER:
        context.root.remove(stored.part(STATE + name).key)
    ensure_reference(context, prepared, context.fleet.group)
    with pytest.raises(PartMissing, match="optimizer"):
        ensure_state(context, prepared, stored)
