"""Batches are dealt to engines by the number in flight at each, and taken back from lost engines."""

import threading
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from storage.errors import InputError, SyncMismatch, WorkerLost
from tasks.config.run import WorkersSection
from tasks.engine.protocol import COMPLETIONS, Collected, Every, Sampling
from tasks.workers.interface import EngineHandle
from tasks.workers.sampling import Batch, Growing, sample, spread
from tests.small.here import GroupHere
from tests.small.workers import SmallEngine

HOW = Sampling(max_tokens=2)


class Echo(SmallEngine):
    """Answers each prompt with its seed. It finishes a batch only when it is `allowed` to, and dies at `dies_at`."""

    def __init__(self, dies_at=None, error=WorkerLost, allowed=None):
        super().__init__("")
        self.dies_at, self.error, self.allowed = dies_at, error, allowed
        self.seen, self.most, self.collected = [], 0, 0

    def enqueue(self, number, *batch):
        super().enqueue(number, *batch)
        self.seen.append(number)
        self.most = max(self.most, len(self._queued))

    def collect(self, wait_s):
        if self.collected == self.dies_at:
            raise self.error("the engine died")
        if self.allowed is not None:
            self.allowed.wait(10)
        self.collected += 1
        return super().collect(wait_s)

    def generate(self, prompts, seeds, sampling):
        rows = [pa.array([[seed] for seed in seeds], COMPLETIONS.field(name).type) for name in COMPLETIONS.names[:2]]
        return pa.RecordBatch.from_arrays([*rows, pa.array(["stop"] * len(seeds))], schema=COMPLETIONS)


def handles(*engines):
    return [EngineHandle(GroupHere([engine], lambda _method: None), WorkersSection()) for engine in engines]


def batches(count, size=2):
    return [Batch([[7]] * size, range(number * size, (number + 1) * size)) for number in range(count)]


def sampled(engines, work, **more):
    """Sampled responses, by number, as their first tokens; each batch only once."""
    found = {}

    def ready(number, completions):
        assert number not in found
        found[number] = [tokens[0] for tokens in completions["response_tokens"].to_pylist()]

    sample(handles(*engines), work, HOW, ready, **more)
    return found


def wanted(work):
    return {number: list(batch.seeds) for number, batch in enumerate(work)}


@pytest.mark.parametrize("count", [1, 3])
def test_every_batch_comes_back_under_its_number(count):
    work = batches(7)
    assert sampled([Echo() for _ in range(count)], work) == wanted(work)


def test_no_batches_need_no_engine():
    assert sampled([Echo(dies_at=0)], []) == {}


def test_an_engine_holds_the_next_batch_before_it_needs_it_and_no_more():
    engine, work = Echo(), batches(9)
    assert sampled([engine], work, ahead=4) == wanted(work)
    assert engine.most == 2
    assert engine.seen == list(range(9))


def test_a_batch_larger_than_what_may_be_in_flight_is_sampled():
    work = batches(2, size=50)
    assert sampled([Echo()], work, ahead=4) == wanted(work)


def test_the_engine_with_least_in_flight_gets_the_next_batch():
    free = threading.Event()
    slow, quick = Echo(allowed=free), Echo()
    work = batches(8)

    def told(done):
        if done == 2 * 7:  # all but the one that the slow engine holds
            free.set()

    assert sampled([slow, quick], work, ahead=1, told=told) == wanted(work)
    assert len(slow.seen) == 1
    assert len(quick.seen) == 7


@pytest.mark.parametrize("dies_at", [0, 2])
def test_the_others_sample_what_a_lost_engine_had(dies_at):
    lost, other, work = Echo(dies_at=dies_at), Echo(), batches(10)
    counts = []
    assert sampled([lost, other], work, told=counts.append) == wanted(work)
    assert set(lost.seen) - set(range(10)) == set()
    assert counts[-1] == 20
    assert max(counts) == 20


class Counting(Echo):
    """Answers each prompt with six tokens that count on from its seed."""

    def enqueue(self, number, prompts, seeds, sampling, begun=(), every=None, name=""):
        super().enqueue(number, prompts, seeds, sampling, begun, every, name)
        self.begun = {**getattr(self, "begun", {}), number: [one.tokens.tolist() for one in begun]}

    def generate(self, prompts, seeds, sampling):
        responses = [list(range(10 * seed, 10 * seed + 6)) for seed in seeds]
        rows = [pa.array(responses, COMPLETIONS.field(name).type) for name in COMPLETIONS.names[:2]]
        return pa.RecordBatch.from_arrays([*rows, pa.array(["length"] * len(seeds))], schema=COMPLETIONS)


def test_a_response_goes_on_at_another_engine_from_its_last_increment():
    lost, other, work = Counting(dies_at=2), Counting(), batches(2)
    told, found = [], {}
    growing = Growing(Every(2, 1.0), lambda number, some: told.extend((number, *one[1:3]) for one in some))
    free = threading.Event()
    lost.allowed, other.allowed = None, free
    lost.error = lambda why: (free.set(), WorkerLost(why))[1]
    sample(handles(lost, other), work, HOW, found.__setitem__, growing=growing)
    (number,) = lost.begun
    assert other.begun[number] == [
        [10 * seed, 10 * seed + 1, 10 * seed + 2, 10 * seed + 3] for seed in work[number].seeds
    ]
    assert [one[2] for one in told if one[0] == number] == [0, 0, 2, 2]  # nothing again at the other
    for place, batch in enumerate(work):
        assert found[place]["response_tokens"].to_pylist() == [
            [*range(10 * seed, 10 * seed + 6)] for seed in batch.seeds
        ]


def test_an_engine_that_is_dead_before_the_start_is_passed_over():
    dead, work = handles(Echo()), batches(4)
    dead[0].end()
    found = {}
    sample([*dead, *handles(Echo())], work, HOW, found.__setitem__)
    assert found.keys() == {0, 1, 2, 3}


@pytest.mark.parametrize("count", [1, 2])
def test_when_no_engine_is_left_the_loss_is_raised(count):
    with pytest.raises(WorkerLost, match="the engine died"):
        sampled([Echo(dies_at=1) for _ in range(count)], batches(10))


@pytest.mark.parametrize("error", [InputError, KeyboardInterrupt])
def test_any_other_failure_ends_the_work_of_all_engines(error):
    engines = [Echo(dies_at=1, error=error), Echo()]
    with pytest.raises(error, match="the engine died"):
        sampled(engines, batches(2000), ahead=1)
    assert engines[1].collected < 1900


@pytest.mark.parametrize(("version", "refused"), [(None, False), (3, False), (2, True)])
def test_samples_of_another_weight_version_are_refused(version, refused):
    engine, ready = Echo(), []
    engine._version = 3

    def work():
        sample(handles(engine), batches(2), HOW, lambda number, _found: ready.append(number), version=version)

    if refused:
        with pytest.raises(SyncMismatch, match="version 3, but those of version 2 were asked for"):
            work()
    else:
        work()
    assert ready == ([] if refused else [0, 1])


def test_what_an_earlier_caller_left_is_not_answered():
    engine = Echo()
    engine.enqueue(5, [[1]], [3], HOW)
    work = batches(2)
    assert sampled([engine], work) == wanted(work)


def test_samples_of_unfinished_batches_count_until_their_engine_is_lost():
    class HalfDone(Echo):
        def collect(self, wait_s):
            if self.collected:
                raise WorkerLost("the engine died")
            self.collected += 1
            return Collected([], 1)

    class Second(Echo):
        """Finishes nothing until the lost engine's batch has come to it: the loss is known by then."""

        def collect(self, wait_s):
            return super().collect(wait_s) if len(self.seen) == 2 else Collected([], 0)

    counts, work = [], batches(2)
    assert sampled([HalfDone(), Second()], work, told=counts.append) == wanted(work)
    assert [count for count, _ in groupby(counts) if count] == [1, 2, 4]


def test_steps_have_a_deadline_of_their_own():
    waits = []

    class Waiting(GroupHere):
        def submit(self, method, *arguments):
            answer = super().submit(method, *arguments)
            return SimpleNamespace(
                wait=lambda deadline_s: (waits.append((method, deadline_s)), answer.wait(deadline_s))[1]
            )

    deadlines = WorkersSection(call_deadline_s=50, step_deadline_s=5)
    engine = EngineHandle(Waiting([Echo()], lambda _method: None), deadlines)
    sample([engine], batches(1), HOW, lambda _number, _completions: None)
    assert waits == [("drop", 50), ("enqueue", 50), ("collect", 5)]


def test_shares_of_one_batch_come_back_in_order():
    engines = [Echo() for _ in range(3)]
    table = spread(handles(*engines), Batch([[7]] * 10, range(10)), HOW)
    assert table.schema == COMPLETIONS
    assert [row[0] for row in table["response_tokens"].to_pylist()] == list(range(10))
    assert all(engine.seen for engine in engines)
    few = spread(handles(*engines), Batch([[7]], [4]), HOW)
    assert few.num_rows == 1
    assert np.array_equal(few["response_tokens"].to_pylist(), [[4]])
