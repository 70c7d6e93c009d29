"""Batches in flight together, on a real vLLM in one process."""

import numpy as np
import psutil
import pytest

from storage.errors import InputError
from tasks.engine.protocol import Sampling
from tests.tasks.engine.vllm.test_engine import PROMPTS, SEEDS
from tests.tasks.engine_process import VOCABULARY
from tests.tasks.engine_update import serve
from tests.tasks.workers.test_cluster import listening_addresses

LONG = Sampling(max_tokens=24, stop_token_ids=(1, 2, 3))
BATCHES = {number: (PROMPTS[number * 6 : number * 6 + 6], SEEDS[number * 6 : number * 6 + 6]) for number in range(4)}


@pytest.fixture
def engine(served, tmp_path_factory):
    """The engine with the weights of `old`, and nothing in flight."""
    serve(served, tmp_path_factory.mktemp("fresh") / "update", "old", 0)
    return served.engine


def enqueue(engine, numbers=BATCHES, sampling=LONG):
    for number in numbers:
        engine.enqueue(number, *BATCHES[number], sampling)


def collect(engine, count):
    """Finished batches by number in the order in which they ended, and the number of samples reported at each call."""
    found, samples = {}, []
    while len(found) < count:
        collected = engine.collect(0.0)  # a step at a time
        samples.append(collected.samples)
        found |= {batch.number: batch.completions for batch in collected.finished}
    return found, samples


def test_batches_have_the_bits_of_each_alone_and_are_done_in_order(engine):
    alone = {number: engine.generate(*batch, LONG) for number, batch in BATCHES.items()}
    enqueue(engine)
    found, samples = collect(engine, len(BATCHES))
    assert list(found) == list(BATCHES)
    assert all(found[number].equals(alone[number]) for number in BATCHES)
    assert sum(samples) == sum(len(prompts) for prompts, _ in BATCHES.values())
    assert max(samples) < 6  # reported as they end, not batch by batch
    assert engine.collect(5.0) == ([], 0, [])


def test_the_next_batch_begins_without_being_asked_for(engine):
    enqueue(engine, [0, 1])
    found, _ = collect(engine, 1)
    enqueue(engine, [2])
    assert list(found) == [0]
    assert list(collect(engine, 2)[0]) == [1, 2]


@pytest.mark.parametrize("call", ["drop", "generate", "score", "update"])
def test_what_was_not_collected_is_dropped_by_any_other_call(served, engine, tmp_path, call):
    alone = engine.generate(*BATCHES[3], LONG)
    enqueue(engine, [0, 1, 2])
    engine.collect(0.0)
    match call:
        case "drop":
            engine.drop()
        case "generate":
            assert engine.generate(*BATCHES[3], LONG).equals(alone)
        case "score":
            scores = engine.score(BATCHES[0][0])
            assert [len(score) for score in scores] == [len(prompt) - 1 for prompt in BATCHES[0][0]]
        case "update":
            serve(served, tmp_path / "update", "old", 1)
    assert engine.collect(0.0) == ([], 0, [])
    enqueue(engine, [3])
    assert collect(engine, 1)[0][3].equals(alone)


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_queued(engine):
    with pytest.raises(InputError, match="prompt 1 has 0 tokens"):
        engine.enqueue(0, [[5], []], [0, 1], LONG)
    assert engine.collect(0.0) == ([], 0, [])


def test_an_empty_batch_is_refused_because_it_would_never_end(engine):
    with pytest.raises(InputError, match="batch 2 holds no prompts"):
        engine.enqueue(2, [], [], LONG)
    assert engine.score([]) == []


def test_an_engine_listens_on_the_loopback_interface_only(served):
    assert listening_addresses([psutil.Process(served.pid)]) == {"127.0.0.1"}


def test_a_prompt_may_be_an_array(engine):
    prompts = [np.array(prompt, np.int32) for prompt in BATCHES[0][0]]
    assert all(token < VOCABULARY for prompt in prompts for token in prompt)
    assert engine.generate(prompts, BATCHES[0][1], LONG).equals(engine.generate(*BATCHES[0], LONG))


def test_an_engine_on_cpu_does_not_sleep_and_says_so(engine):
    before = engine.generate(PROMPTS, range(len(PROMPTS)), LONG)
    held = engine.identity()
    assert engine.sleep() is False
    engine.wake()
    assert engine.identity() == held
    assert engine.generate(PROMPTS, range(len(PROMPTS)), LONG).equals(before)
