"""Trainer ranks free memory before engines sample, keep the weights until they are sent, and restore everything."""

from collections import Counter

import pytest

from flows.iteration import begin, iterate
from storage.backends.root import open_root
from storage.manifest import need
from tasks.config.stored import record_config
from tasks.stages.names import Stage
from tasks.stages.served_weights import ensure_served
from tests.small.config import small_config
from tests.small.here import WorkersHere, context_here
from tests.small.workers import SIZE, SmallTrainer

EVERYTHING = ["train.memory.offload_parameters=true", "train.memory.drop_gradients=true"]
EVERYTHING += ["train.memory.offload_optimizer=true"]
WATCHED = ("release", "resume", "train_policy", "send_weights", "logprobs", "enqueue")


class Watching(SmallTrainer):
    """A rank that remembers the memory that it was asked to free."""

    def release(self, memory):
        self.asked = [*vars(self).get("asked", []), memory]
        return super().release(memory)


class Workers(WorkersHere):
    """Workers that record requests, and count early starts."""

    def expect(self):
        self.calls.append("expect")

    def warm(self, model_dir, config):
        self.calls.append("warm")

    def trainers(self, model_dir, config):
        self.calls.append("trainers")
        return super().trainers(model_dir, config)


@pytest.fixture
def opened(tmp_path):
    """Contexts over new workers, by further settings, on one root."""
    with_blocks = []

    def open_one(settings):
        config = small_config(["run.iterations=1", *settings])
        root = open_root(str(tmp_path / "root"))
        record_config(root, "small", config)
        workers = Workers(config, trainer=Watching)
        block = context_here(root, config, tmp_path / f"scratch-{len(with_blocks)}", workers=workers)
        with_blocks.append(block)
        return block.__enter__()

    yield open_one
    for block in reversed(with_blocks):
        block.__exit__(None, None, None)


def done(context):
    """Run one iteration after the first; its calls, in order, a repeated call once."""
    position = begin(context)
    context.workers.calls.append("iterate")
    after = iterate(context, 1, position)
    context.outbox.settle()
    calls = context.workers.calls[context.workers.calls.index("iterate") :]
    watched = [call for call in calls if call in WATCHED]
    return after, [one for one, last in zip(watched, ["", *watched], strict=False) if one != last]


def test_without_a_switch_nobody_is_asked(opened):
    context = opened([])
    done(context)
    called = Counter(context.workers.calls)
    assert called["release"] == called["resume"] == 0
    assert called["warm"] > 0
    assert "released_bytes" not in need(context.root, "small", 1, Stage.WEIGHT_SYNC).metrics


def test_processes_import_while_the_model_is_made(opened):
    context = opened([])
    done(context)
    assert context.workers.calls.index("expect") == 0
    assert context.workers.calls.count("expect") == 1


def test_engines_sample_while_the_memory_is_given_up(opened):
    context = opened(EVERYTHING)
    _, order = done(context)
    # the weights stay until they are sent and the probe is scored; evaluating asks again
    assert order[:8] == [
        "release", "enqueue", "resume", "train_policy", "release", "send_weights", "logprobs", "release",
    ]  # fmt: skip
    assert "warm" not in context.workers.calls
    (first, *_), last = context.workers.ranks[0].asked, context.workers.ranks[0].asked[-1]
    assert (first.offload_parameters, first.drop_gradients, first.offload_optimizer) == (False, True, True)
    assert last == context.config.train.memory
    metrics = need(context.root, "small", 1, Stage.WEIGHT_SYNC).metrics
    assert metrics["released_bytes"] == 2 * 3 * SIZE * 4  # of two ranks
    assert metrics["release_seconds"] > 0
    assert need(context.root, "small", 1, Stage.TRAIN).metrics["resume_seconds"] > 0


def test_engines_that_sleep_have_started_before_new_ranks_take_the_card(opened):
    context = opened([*EVERYTHING, "engine.sleep=true"])
    begin(context)
    calls = [call for call in context.workers.calls if call in ("sleep", "trainers", "warm", "import_model")]
    engines = context.config.engine.count
    assert calls[: engines + 2] == ["sleep"] * engines + ["trainers", "import_model"]


def test_without_a_switch_engines_start_while_the_ranks_do(opened):
    context = opened(["engine.sleep=true"])
    begin(context)
    calls = [call for call in context.workers.calls if call in ("sleep", "trainers", "warm", "import_model")]
    engines = context.config.engine.count
    assert calls[: engines + 3] == ["warm", "trainers", *["sleep"] * engines, "import_model"]


@pytest.mark.slow
@pytest.mark.parametrize("switch", EVERYTHING)
def test_results_are_those_of_a_run_that_keeps_everything(opened, tmp_path, switch):
    found = {}
    for settings in ([], [switch]):
        root = open_root(str(tmp_path / f"root-{len(settings)}"))
        config = small_config(["run.iterations=1", *settings])
        record_config(root, "small", config)
        with context_here(root, config, tmp_path / f"here-{len(settings)}") as context:
            done(context)
        found[len(settings)] = need(root, "small", 1, Stage.WEIGHT_SYNC).facts["weights_digest"]
    assert found[0] == found[1]


def test_ranks_that_are_new_give_up_their_memory_before_engines_sample(opened):
    context = opened(EVERYTHING)
    after, _ = done(context)
    fresh = opened(EVERYTHING)
    ensure_served(fresh, after.prepared, after.served)
    calls = fresh.workers.calls
    assert calls[:2] == ["trainers", "release"]  # before the first engine is made
    assert calls.index("send_weights") < len(calls) - 1 - calls[::-1].index("release")
    assert not fresh.workers.ranks[0].arrays
