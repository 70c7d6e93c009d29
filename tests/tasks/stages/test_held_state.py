"""Files that are fetched for the trainer ranks: all files of a state, or only those that its weights need."""

import json
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from storage.backends.root import Root, open_root
from storage.errors import (
    CommitConflict,
    DigestMismatch,
    PartMissing,
    SchemaMismatch,
    StorageError,
    StorageUnavailable,
    WorkerLost,
)
from storage.manifest import Origin, commit
from storage.parts import PartWriter
from tasks.config.document import parse_config
from tasks.config.stored import ConfigRecord
from tasks.stages.context import RunContext
from tasks.stages.held_state import STATE, ensure_reference, ensure_state, saved, trainers
from tasks.stages.names import Stage
from tasks.stages.stage import Work
from tasks.stages.views import IDENTITY, Prepared, Trained
from tests.small.files import replace_file
from tests.small.here import GroupHere, WorkersHere
from tests.small.workers import SmallTrainer
from tests.storage.tables import manifest
from tests.tasks.config.test_run import MINIMAL
from trainer_core.config import OptimizerConfig
from trainer_core.protocol import Generators, LoadedState, SavedFiles
from trainer_core.state.facts import StateIdentity

OTHER = OptimizerConfig(learning_rate=0.25)
IDENTITY_OF_STATE = StateIdentity(scheme=1, tensors="t", progress="p", generators="g")
WEIGHTS = {"weights.0.safetensors": 100_000, "weights.1.safetensors": 100_000, "trainer.json": None}
OPTIMIZER = {"optimizer.0.safetensors": 300_000, "optimizer.1.safetensors": 300_000}


class Watching(SmallTrainer):
    """A rank that remembers which files it was given."""

    held = IDENTITY_OF_STATE
    drawn: Generators = "restored"

    def load(self, directory: Path) -> LoadedState:
        self.given = sizes(directory)
        return LoadedState(0, self.drawn, OTHER, 0, self.held)

    def load_reference(self, directory: Path, identity: str) -> None:
        self.given_reference = sizes(directory)


def sizes(directory: Path) -> dict[str, int]:
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
    given = {"facts": {"cursor": 0, IDENTITY: IDENTITY_OF_STATE.model_dump(mode="json")}, **fields}
    return Trained(commit(root, manifest(Stage.TRAIN, 0, named, content=IDENTITY, **given)))


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


@pytest.mark.parametrize("forked", [True, False])
def test_a_state_is_fetched_as_a_whole(context, prepared, forked):
    """A fork with other settings of the optimizer fetches it as a whole too: its moments continue."""
    files = {**WEIGHTS, **OPTIMIZER}
    stored = of_a_fork(context.root, OTHER) if forked else state(context.root, OTHER, files)
    ensure_state(context, prepared, stored)
    assert rank(context).given.keys() == files.keys()
    assert trainers(context, prepared).identity() == stored.digest


def with_identity(root: Root, **differing: str) -> Trained:
    recorded = IDENTITY_OF_STATE.model_copy(update=differing).model_dump(mode="json")
    return state(root, OTHER, WEIGHTS, facts={"cursor": 0, IDENTITY: recorded})


@pytest.mark.parametrize("differing", ["tensors", "progress", "generators"])
def test_what_was_loaded_is_compared_with_what_is_recorded(context, prepared, differing):
    stored = with_identity(context.root, **{differing: "other"})
    with pytest.raises(DigestMismatch, match=f"is not what its manifest records: {differing} differ after it was"):
        ensure_state(context, prepared, stored)
    assert trainers(context, prepared).identity() is None


def test_generators_that_were_reseeded_are_not_compared(context, prepared):
    trainers(context, prepared)
    rank(context).drawn = "reseeded"
    stored = with_identity(context.root, generators="of another layout")
    ensure_state(context, prepared, stored)
    assert trainers(context, prepared).identity() == stored.digest


def test_a_state_that_was_still_to_be_stored_is_loaded_as_it_was_published(context, prepared):
    stored = with_identity(context.root)
    begun = Trained(stored.manifest.model_copy(update={"parts": ()}))
    assert begun.digest == stored.digest
    ensure_state(context, prepared, begun)
    assert rank(context).given.keys() == WEIGHTS.keys()


def test_a_state_that_another_process_has_published_is_not_taken_for_ours(context, prepared):
    stored = with_identity(context.root)
    facts = {**stored.manifest.facts, "cursor": 1}
    with pytest.raises(CommitConflict, match="another process has done the stage"):
        ensure_state(context, prepared, Trained(stored.manifest.model_copy(update={"parts": (), "facts": facts})))


class Full(SmallTrainer):
    """A rank that finds no room in shared memory."""

    def save(self, directory: Path) -> SavedFiles:
        if "memory" in directory.parts:
            raise StorageUnavailable("no room")
        return super().save(directory)


def test_without_room_in_shared_memory_states_are_written_to_scratch(context, prepared, tmp_path, caplog):
    workers = WorkersHere(context.config, trainer=Full)
    context = replace(context, workers=workers, memory=tmp_path / "memory")
    for iteration in (0, 1):
        work = Work(context, iteration, PartWriter(context.root, "run", iteration, Stage.TRAIN))
        output = saved(work, trainers(context, prepared), {}, {})
        assert output.store is not None
        assert [part.name for part in output.store()] == [STATE + name for name in sorted(names_of(context.scratch))]
    assert workers.calls.count("save") == 3
    assert caplog.messages == [
        f"train states are written to {context.scratch / 'state'} before they are stored: no room"
    ]


def names_of(scratch: Path) -> list[str]:
    return [path.name for path in (scratch / "state").iterdir() if not path.name.startswith("held")]


@pytest.fixture
def kept(context, prepared, tmp_path):
    """The context of ranks that have saved a state into shared memory, and the state, which is stored."""
    workers = WorkersHere(context.config)
    context = replace(context, workers=workers, memory=tmp_path / "memory")
    group = trainers(context, prepared)
    workers.ranks[0].arrays["weights"] += 1
    work = Work(context, 0, PartWriter(context.root, "run", 0, Stage.TRAIN))
    output = saved(work, group, {"cursor": 0}, {})
    assert output.store is not None
    assert output.identified is not None
    parts, fields = output.store(), {"content": IDENTITY, "facts": output.facts}
    stored = Trained(commit(context.root, manifest(Stage.TRAIN, 0, parts, **fields)))
    output.identified(stored.digest)
    return replace(context, workers=WorkersHere(context.config)), stored


def lose(context: RunContext, state: Trained) -> None:
    for part in state.manifest.parts:
        context.root.remove(part.key)


def weights_file(context: RunContext) -> Path:
    assert context.memory is not None
    return context.memory / "state" / "weights-0.bin"


def test_new_ranks_load_what_those_before_them_left_in_memory(kept, prepared):
    context, stored = kept
    lose(context, stored)
    assert ensure_state(context, prepared, stored).identity() == stored.digest


def test_a_torn_copy_in_memory_is_not_used(kept, prepared, caplog):
    context, stored = kept
    content = weights_file(context).read_bytes()
    replace_file(weights_file(context), bytes([content[0] ^ 1]) + content[1:])
    assert ensure_state(context, prepared, stored).identity() == stored.digest
    assert context.workers.calls.count("load") == 2
    assert "tensors differ after it was loaded" in caplog.text
    lose(context, stored)
    with pytest.raises(PartMissing):
        ensure_state(replace(context, workers=WorkersHere(context.config)), prepared, stored)


class HalfBlind(SmallTrainer):
    """A rank that alone cannot read the state in memory."""

    def load(self, directory: Path) -> LoadedState:
        if Path(directory).name == "state":
            raise PartMissing("this rank's file is gone")
        return super().load(directory)


class Fragile(GroupHere):
    """A group that is ended when a rank fails alone, as the real one is."""

    def submit(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return super().submit(method, *arguments, **options)
        except PartMissing:
            self.end()
            raise


def test_ranks_that_fail_apart_over_memory_load_from_the_store(kept, prepared):
    context, stored = kept
    workers = WorkersHere(context.config, trainer=HalfBlind, group=Fragile)
    group = ensure_state(replace(context, workers=workers), prepared, stored)
    assert group.alive()
    assert group.identity() == stored.digest


def test_another_state_in_memory_is_not_used(kept, prepared):
    context, stored = kept
    other = Trained(stored.manifest.model_copy(update={"config_digest": "other"}))
    ensure_state(context, prepared, other)
    lose(context, stored)
    with pytest.raises(PartMissing):
        ensure_state(replace(context, workers=WorkersHere(context.config)), prepared, other)


class Dying(SmallTrainer):
    """A rank that ends while it saves."""

    def save(self, directory: Path) -> SavedFiles:
        raise WorkerLost("in the middle")


def test_a_folder_that_is_being_written_holds_no_state(kept, prepared):
    context, stored = kept
    group = trainers(replace(context, workers=WorkersHere(context.config, trainer=Dying)), prepared)
    with pytest.raises(WorkerLost):
        saved(Work(context, 1, PartWriter(context.root, "run", 1, Stage.TRAIN)), group, {}, {})
    lose(context, stored)
    with pytest.raises(PartMissing):
        ensure_state(context, prepared, stored)


def test_a_state_waits_for_the_one_that_is_on_its_way(context, prepared):
    begun, released = threading.Event(), threading.Event()

    def store() -> None:
        begun.set()
        released.wait(10)

    group = trainers(context, prepared)
    context.outbox.add(store)
    begun.wait(10)
    threading.Timer(0.2, released.set).start()
    output = saved(Work(context, 1, PartWriter(context.root, "run", 1, Stage.TRAIN)), group, {}, {})
    assert context.outbox.idle
    assert output.metrics["state_wait_seconds"] > 0.1


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
    """The held state is compared by its identity; holding some state is not enough."""
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


@pytest.mark.parametrize(
    ("recorded", "error", "message"),
    [
        ({**IDENTITY_OF_STATE.model_dump(), "scheme": 2}, SchemaMismatch, "by the rules 2; .* knows those up to 1"),
        ("a digest", StorageError, "records 'a digest' as state, but the identity of a state is expected"),
    ],
)
def test_an_identity_by_other_rules_is_refused(context, prepared, recorded, error, message):
    facts = {"cursor": 0, IDENTITY: recorded}
    stored = state(context.root, OTHER, WEIGHTS, facts=facts)
    with pytest.raises(error, match=message):
        ensure_state(context, prepared, stored)
