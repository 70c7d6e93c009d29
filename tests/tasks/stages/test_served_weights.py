"""What engines hold is compared with what was sent, and with what was recorded."""

from dataclasses import replace

import pytest

from flows.iteration import Position, begin
from storage.backends.root import open_root
from storage.errors import SyncMismatch
from tasks.config.stored import record_config
from tasks.stages.served_weights import ensure_served
from tasks.stages.views import Served
from tests.small.config import small_config
from tests.small.here import WorkersHere, context_here
from tests.small.workers import SmallEngine


class Lying(SmallEngine):
    """An engine that reports other weights than it was sent."""

    def receive(self, directory, version, records):
        return super().receive(directory, version, records).model_copy(update={"weights_digest": "other"})


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
    assert context.workers.calls == ["identity"]


def test_a_new_engine_gets_the_weights_that_were_recorded(context, config, position):
    other = another_process(context, config)
    (engine,) = ensure_served(other, position.prepared, position.served)
    assert engine.identity().weights_digest == position.served.weights_digest
    assert {"load", "export", "receive"} <= set(other.workers.calls)


def test_a_receipt_for_other_weights_is_refused(context, config, position):
    with pytest.raises(SyncMismatch, match="an engine reports weights other after"):
        ensure_served(another_process(context, config, engine=Lying), position.prepared, position.served)


def test_a_state_that_gives_other_weights_than_were_recorded_is_refused(context, config, position):
    facts = {**position.served.manifest.facts, "weights_digest": "0" * 32}
    recorded = Served(position.served.manifest.model_copy(update={"facts": facts}))
    with pytest.raises(SyncMismatch, match="but 00000000000000000000000000000000 were served when it was committed"):
        ensure_served(another_process(context, config), position.prepared, recorded)
