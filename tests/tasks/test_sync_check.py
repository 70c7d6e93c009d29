"""Engines that hold the stored weights, others, or none, as `ratchet check-sync` tells them apart."""

from types import SimpleNamespace

import pytest

from flows.iteration import begin
from storage.backends.root import open_root
from tasks.config.run import WorkersSection
from tasks.config.stored import record_config
from tasks.sync_check import check_sync
from tasks.workers.interface import EngineHandle
from tests.small.config import small_config
from tests.small.here import GroupHere, WorkersHere, context_here
from tests.small.workers import LAYERS, SmallEngine, layers_of


@pytest.fixture
def run(tmp_path):
    """A run whose engine serves iteration 0, and the digests of its weights."""
    config = small_config()
    root = open_root(str(tmp_path / "root"))
    record_config(root, "small", config)
    made = []
    workers = WorkersHere(config, engine=lambda directory: made.append(SmallEngine(directory)) or made[-1])
    with context_here(root, config, tmp_path / "scratch", workers=workers) as context:
        position = begin(context)
        context.outbox.settle()
        yield SimpleNamespace(
            context=context,
            config=config,
            engine=made[0],
            calls=workers.calls,
            stored=made[0].held(),
            served=position.served,
        )


def asked(run, engine, stored):
    handle = EngineHandle(GroupHere([engine], run.calls.append), WorkersSection())
    return check_sync(run.context, 0, stored, {"engine-0": handle}, lambda _line: None)


def test_an_engine_that_serves_the_stored_weights_is_only_asked(run):
    run.calls.clear()
    found = asked(run, run.engine, run.stored)
    assert (found.equal, found.stored) == (True, "equal")
    assert found.weights_digest == run.served.weights_digest == found.engines[0].weights_digest
    assert set(run.calls) == {"identity", "held"}


def test_a_tensor_that_differs_is_named(run):
    layers_of(run.engine.weights)[LAYERS[2]][5] += 1
    found = asked(run, run.engine, run.stored)
    assert not found.equal
    assert found.engines[0].differing == (LAYERS[2],)
    assert "but" in found.engines[0].problem
    unnamed = asked(run, run.engine, None)
    assert (unnamed.equal, unnamed.stored, unnamed.engines[0].differing) == (False, "not compared", ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "problem"),
    [
        (lambda engine: engine.refuse("a probe failed"), "serves no weights"),
        (lambda engine: engine.__init__(""), "serves no weights"),
        (lambda engine: vars(engine).update(_version=3), "it serves version 3, not 0"),
    ],
)
def test_an_engine_that_serves_something_else_is_told(prepare, problem, run):
    prepare(run.engine)
    found = asked(run, run.engine, run.stored)
    assert not found.equal
    assert problem in found.engines[0].problem


def test_a_state_that_gives_other_weights_is_told(run):
    found = asked(run, run.engine, {**run.stored, LAYERS[0]: "0" * 32})
    assert (found.equal, found.stored) == (False, "different")
    assert (found.engines[0].problem, found.engines[0].differing) == (None, (LAYERS[0],))


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [False, True])
def test_without_engines_a_new_one_is_proven(faulty, run):
    class Faulty(SmallEngine):
        def _loaded(self, name, octets):
            super()._loaded(name, octets + (name == LAYERS[1]))

    new = WorkersHere(run.config, engine=Faulty if faulty else SmallEngine)
    context = type(run.context)(**{**vars(run.context), "workers": new})
    found = check_sync(context, 0, run.stored, {}, lambda _line: None)
    assert found.equal is not faulty
    assert LAYERS[1] in (found.engines[0].problem or LAYERS[1])
