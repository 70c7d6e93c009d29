"""What is fetched for the trainer ranks: all files of a state, or only those that its weights need."""

import json
import threading
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest

from storage.backends.root import Root, open_root
from storage.errors import PartMissing
from storage.manifest import Origin, commit
from storage.parts import PartWriter
from tasks.config.document import parse_config
from tasks.config.stored import ConfigRecord
from tasks.stages.context import RunContext
from tasks.stages.held_state import STATE, ensure_reference, ensure_state, trainers
from tasks.stages.names import Stage
from tasks.stages.views import Prepared, Trained
from tests.small.here import WorkersHere
from tests.small.workers import SmallTrainer
from tests.storage.tables import manifest
from tests.tasks.config.test_run import MINIMAL
from trainer_core.config import OptimizerConfig, ParallelConfig
from trainer_core.protocol import LoadedState

OTHER = OptimizerConfig(learning_rate=0.25)
WEIGHTS = {".metadata": 3_000, "__0_0.distcp": 100_000, "__1_0.distcp": 100_000, "trainer.json": None}
OPTIMIZER = {"optimizer.__0_1.distcp": 300_000, "optimizer.__1_1.distcp": 300_000}


class Watching(SmallTrainer):
    """A rank that remembers which files it was given."""

    def load(self, directory: str, fresh_optimizer: bool = False) -> LoadedState:
        self.given = sizes(directory)
        self.fresh = fresh_optimizer
        return LoadedState(0, "restored", ParallelConfig(), OTHER, 0)

    def load_reference(self, directory: str, identity: str) -> None:
        self.given_reference = sizes(directory)


def sizes(directory: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in Path(directory).iterdir()}


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_root(str(tmp_path / "runs"))


@pytest.fixture
def context(root: Root, tmp_path: Path) -> RunContext:
    config = parse_config(tomllib.loads(f"{MINIMAL}\n[train.policy]\nkl_coefficient = 0.1\n"), "test")
    workers = WorkersHere(config, trainer=Watching)
    return RunContext("run", root, config, ConfigRecord.of(config).digest, workers, tmp_path / "scratch")


@pytest.fixture
def prepared(root: Root) -> Prepared:
    part = PartWriter(root, "run", 0, Stage.PREPARE).write_bytes("model/config.json", b"{}")
    return Prepared(commit(root, manifest(Stage.PREPARE, 0, (part,))))


def state(root: Root, optimizer: OptimizerConfig, files: dict[str, int | None], **fields: Any) -> Trained:
    writer = PartWriter(root, "run", 0, Stage.TRAIN)
    facts = json.dumps({"optimizer": optimizer.model_dump()}).encode()
    parts = [
        writer.write_bytes(name, facts if size is None else name.encode().ljust(size, b"."))
        for name, size in files.items()
    ]
    named = tuple(part.model_copy(update={"name": STATE + part.name}) for part in parts)
    return Trained(commit(root, manifest(Stage.TRAIN, 0, named, **fields)))


def of_a_fork(root: Root, optimizer: OptimizerConfig) -> Trained:
    origin = Origin(run="parent", digest="d", config_digest="c")
    return state(root, optimizer, {**WEIGHTS, **OPTIMIZER}, origin=origin)


def rank(context: RunContext) -> Watching:
    return cast("Watching", cast("WorkersHere", context.workers).ranks[0])


def test_a_reference_is_fetched_without_the_optimizer(context, prepared):
    stored = state(context.root, OTHER, {**WEIGHTS, **OPTIMIZER})
    ensure_reference(context, prepared, trainers(context, prepared))
    found = rank(context).given_reference
    assert found.keys() == WEIGHTS.keys()
    assert sum(found.values()) < 0.3 * sum(part.bytes for part in stored.manifest.parts)
    assert not list(context.scratch.glob("load-*"))


def test_a_fork_with_another_optimizer_fetches_the_weights_alone(context, prepared):
    ensure_state(context, prepared, of_a_fork(context.root, OTHER))
    assert rank(context).fresh is True
    assert rank(context).given.keys() == WEIGHTS.keys()


@pytest.mark.parametrize("forked", [True, False])
def test_a_state_is_fetched_as_a_whole(context, prepared, forked):
    optimizer = context.config.train.optimizer
    files = {**WEIGHTS, **OPTIMIZER}
    stored = of_a_fork(context.root, optimizer) if forked else state(context.root, OTHER, files)
    ensure_state(context, prepared, stored)
    assert rank(context).fresh is False
    assert rank(context).given.keys() == files.keys()


def test_of_a_state_of_mixed_files_all_are_fetched(context, prepared):
    state(context.root, OTHER, WEIGHTS)
    ensure_reference(context, prepared, trainers(context, prepared))
    assert rank(context).given_reference.keys() == WEIGHTS.keys()


def test_a_lost_optimizer_does_not_keep_from_a_reference(context, prepared):
    stored = state(context.root, OTHER, {**WEIGHTS, **OPTIMIZER})
    for name in OPTIMIZER:
        context.root.remove(stored.manifest.part(STATE + name).key)
    ensure_reference(context, prepared, trainers(context, prepared))
    with pytest.raises(PartMissing, match="optimizer"):
        ensure_state(context, prepared, stored)


def test_ranks_that_hold_another_state_load_the_one_that_is_asked_for(context, prepared):
    """What they hold is compared by its identity, not by whether they hold anything."""
    stored = state(context.root, context.config.train.optimizer, {**WEIGHTS, **OPTIMIZER})
    group = trainers(context, prepared)
    group.adopt("the state of another iteration")
    ensure_state(context, prepared, stored)
    assert rank(context).given.keys() == {**WEIGHTS, **OPTIMIZER}.keys()
    assert group.identity() == stored.digest


def test_a_state_on_its_way_to_storage_is_waited_for(context, prepared):
    held: list[Trained] = []
    begun = threading.Event()

    def store() -> None:
        begun.wait(10)
        held.append(state(context.root, context.config.train.optimizer, {**WEIGHTS, **OPTIMIZER}))

    twin = state(open_root(f"{context.scratch}-twin"), context.config.train.optimizer, {**WEIGHTS, **OPTIMIZER})
    context.outbox.add(store)
    threading.Timer(0.2, begun.set).start()
    ensure_state(context, prepared, twin)
    assert [one.manifest.parts for one in held] == [twin.manifest.parts]
