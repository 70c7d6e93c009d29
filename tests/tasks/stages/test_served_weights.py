"""Weights that engines hold are compared with those that were sent, and with the record."""

from dataclasses import replace

import pytest

from flows.iteration import Position, begin, iterate
from storage.backends.root import open_root
from storage.errors import SyncMismatch
from tasks.config.stored import record_config
from tasks.stages import context as context_module
from tasks.stages.served_weights import ensure_served
from tasks.stages.views import Served
from tests.small.config import small_config
from tests.small.here import WorkersHere, context_here
from tests.small.workers import LAYERS, SmallEngine, SmallTrainer


class Lying(SmallEngine):
    """An engine that does not hold the weights that it was sent."""

    def _loaded(self, name, octets):
        super()._loaded(name, octets + 1)


@pytest.fixture
def config():
    return small_config()


@pytest.fixture
def context(config, tmp_path):
    root = open_root(str(tmp_path / "root"))
    record_config(root, "small", config)
    with context_here(root, config, tmp_path / "scratch") as context:
        yield context


@pytest.fixture
def position(context) -> Position:
    found = begin(context)
    context.outbox.settle()
    return found


def another_process(context, config, **more):
    """The context of another process, whose workers hold nothing."""
    return replace(context, workers=WorkersHere(config, **more))


def test_an_engine_that_holds_the_weights_is_left_alone(context, position):
    context.workers.calls.clear()
    ensure_served(context, position.prepared, position.served)
    assert context.workers.calls == ["drop", "identity"]


def test_a_new_engine_gets_the_weights_that_were_recorded(context, config, position):
    other = another_process(context, config)
    (engine,) = ensure_served(other, position.prepared, position.served)
    assert engine.identity().weights_digest == position.served.weights_digest
    for calls in (other.workers.calls, context.workers.calls):  # those of the stage weight-sync, too
        assert {"plan_weights", "send_weights", "receive_update", "commit_update"} <= set(calls)
        assert calls.index("drop") < calls.index("prepare_update")  # nothing of before goes on under these weights
    assert "load" not in other.workers.calls  # the optimizer is not needed
    assert all(rank.identity() is None for rank in other.workers.ranks)


def test_only_the_engine_that_is_new_gets_them_from_ranks_that_hold_them(config, tmp_path):
    config = small_config(["engine.count=2"])
    root = open_root(str(tmp_path / "root"))
    record_config(root, "small", config)
    asked = []

    class Asked(SmallTrainer):
        def send_weights(self, digest, channel, stored=None):
            asked.append(stored)
            return super().send_weights(digest, channel, stored)

    with context_here(root, config, tmp_path / "scratch", workers=WorkersHere(config, trainer=Asked)) as context:
        position = begin(context)
        workers = context.workers
        workers._engines.pop()
        workers.calls.clear()
        engines = ensure_served(context, position.prepared, position.served)
        assert {engine.identity().weights_digest for engine in engines} == {position.served.weights_digest}
        assert workers.calls.count("prepare_update") == workers.calls.count("commit_update") == 1
        assert set(asked) == {None}
        context.outbox.settle()


def test_a_new_engine_that_does_not_hold_what_it_was_sent_is_refused(context, config, position):
    with pytest.raises(SyncMismatch, match=f"engine 0 has received {LAYERS[0]}"):
        ensure_served(another_process(context, config, engine=Lying), position.prepared, position.served)


def test_a_state_that_gives_other_weights_than_were_recorded_is_refused(context, config, position):
    facts = {**position.served.manifest.facts, "weights_digest": "0" * 32}
    recorded = Served(position.served.manifest.model_copy(update={"facts": facts}))
    with pytest.raises(SyncMismatch, match="but 00000000000000000000000000000000 were served when it was committed"):
        ensure_served(another_process(context, config), position.prepared, recorded)


def test_waiting_for_processes_that_were_just_started_is_a_line_of_its_own(tmp_path, monkeypatch):
    """The line appears once for each, and not at all if there was no wait."""
    monkeypatch.setattr(context_module, "_WORTH_A_LINE_S", 0.0)
    said: list[str] = []
    config = small_config(["run.iterations=1"])
    with context_here(open_root(str(tmp_path / "root")), config, tmp_path / "scratch", say=said.append) as context:
        position = begin(context)
        iterate(context, 1, position)
        assert context.starts.seconds > 0
    started = [line.partition(" in ")[0] for line in said if line.startswith("started")]
    assert sorted(started) == ["started engine 0", "started the trainer ranks"]
