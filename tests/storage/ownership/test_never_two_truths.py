"""Any interleaving of several processes that drive one run, with crashes at any step and clocks that disagree.

Hypothesis moves the processes one store operation at a time. Each of them works on a chain of stages as a flow does:
hold the lease, use what is committed, else do the work (with another result each time, the worst case) and commit.
Some ask first for a rerun of a finished stage; the next process that drives the run finishes that, and then the chain.
The lease's log keeps as few entries as possible, so numbers become free all the time.
"""

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from storage import layout
from storage.errors import CommitConflict, InputError, LeaseHeld, LeaseLost
from storage.ids import Workflow
from storage.manifest import commit, find
from storage.ownership import log
from storage.ownership.lease import Lease, acquire
from storage.revisions import read_revisions
from storage.upkeep.redoing import Wanted, ask, choose, unfinished
from tasks.stages.names import Stage
from tests.storage.clocks import Time, elsewhere
from tests.storage.stepping import SharedStore, Stepper
from tests.storage.tables import manifest

SECONDS, STAGES, PROCESSES = 10.0, 3, 3
CHAIN = Workflow("prepare", "rollout", "reward", "train", "train", selects="select", behind={"train": ()})
"""Each iteration is one stage, made from that of the previous iteration."""
WHICH = st.integers(0, PROCESSES - 1)


@dataclass
class Worker:
    """A process that drives the run, and its view of it."""

    store: SharedStore
    time: Time
    name: str
    skew: float
    renewals: int
    """Renewals before each stage."""
    again: int = 0
    """Iteration whose stage it asks to redo, if it is finished; 0 for none."""
    lease: Lease | None = None
    used: dict[int, str] = field(default_factory=dict)
    """Digest of the manifest it continued from, by stage."""
    stepper: Stepper | None = None

    def start(self) -> None:
        self.stepper = Stepper(self._work)

    def _work(self) -> None:
        root, clock = self.store.root(lambda: self.stepper), self.time.clock(self.skew)
        try:
            self.lease = acquire(root, "run", elsewhere(self.name), SECONDS, clock, self._pause)
            head = self._redone(root)
            for number in range(STAGES):
                for _ in range(self.renewals):
                    self.lease.renew()
                    self.lease.prune()
                self.used[number] = self._stage(root, number, head).digest
            self.lease.release()
        except (LeaseHeld, LeaseLost):
            pass

    def _redone(self, root):
        """The head, once the requested rerun is done and chosen."""
        if self.again and find(root, "run", self.again, Stage.TRAIN) is not None:
            # `ask` reports an unfinished request; the steps below finish it
            with suppress(InputError):
                wanted = Wanted(self.again, Stage.TRAIN, "a test", self.name, request=self.name)
                ask(root, CHAIN, "run", wanted, self.lease)
        revisions = read_revisions(root, "run")
        begun = unfinished(root, "run", revisions)
        if begun is None:
            return revisions
        self._stage(root, begun.iteration, revisions.seen(begun.revision))
        choose(root, CHAIN, "run", begun.revision, "a test", self.name, self.lease)
        return read_revisions(root, "run")

    def _pause(self, _seconds: float) -> None:
        self.stepper.gate(pausing=True)

    def _stage(self, root, number, seen):
        before = find(root, "run", number - 1, Stage.TRAIN, seen) if number else None
        facts = {"by": self.name, "in": seen.of(number, Stage.TRAIN) if self.renewals % 2 else 0}
        more = {"inputs": {"before": before.digest} if before else {}, "facts": facts, "writer": self.name}
        done = find(root, "run", number, Stage.TRAIN, seen)
        while done is None:
            result = manifest(Stage.TRAIN, number, revision=seen.of(number, Stage.TRAIN), **more)
            try:
                done = commit(root, result, self.lease)
            except CommitConflict:
                done = find(root, "run", number, Stage.TRAIN, seen)
        return done


class NeverTwoTruths(RuleBasedStateMachine):
    """Hypothesis starts, moves and kills processes; time passes; wall clocks show anything."""

    @initialize(skews=st.lists(st.sampled_from([0.0, -86400.0, 86400.0]), min_size=PROCESSES, max_size=PROCESSES))
    def set_up(self, skews):
        self.store, self.time, self.skews = SharedStore(), Time(), skews
        self.workers: list[Worker | None] = [None] * PROCESSES
        self.begun = 0
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(log, "KEPT_ENTRIES", 1)
        self.patched.setattr(log, "_REMOVERS", 1)  # a stepper moves one thread

    @rule(which=WHICH, renewals=st.integers(0, 3), again=st.integers(0, STAGES - 1))
    def start(self, which, renewals, again=0):
        if self.workers[which] is None or self.workers[which].stepper.ended:
            self.begun += 1
            worker = Worker(self.store, self.time, f"worker {self.begun}", self.skews[which], renewals, again)
            self.workers[which] = worker
            worker.start()
            worker.stepper.step_to_write()

    @rule(which=WHICH, count=st.integers(1, 5))
    def move(self, which, count):
        for _ in range(count):
            self.of(which).step()

    @rule(which=WHICH, writes=st.integers(1, 3))
    def move_to_write(self, which, writes):
        for _ in range(writes):
            self.of(which).step_to_write()

    @rule(which=WHICH, writes=st.integers(1, 12))
    def move_while_the_others_are_frozen(self, which, writes):
        for _ in range(writes):
            self.time.pass_by(SECONDS / 4)
            self.of(which).step_to_write()

    @rule(which=WHICH)
    def kill(self, which):
        self.of(which).kill()

    @rule(seconds=st.sampled_from([1.0, SECONDS / 2, SECONDS, SECONDS, 3 * SECONDS]))
    def wait(self, seconds):
        self.time.pass_by(seconds)

    def of(self, which):
        if self.workers[which] is None:
            self.start(which, 0)
        return self.workers[which].stepper

    def living(self):
        return [worker for worker in self.workers if worker is not None]

    @invariant()
    def nothing_failed(self):
        for worker in self.living():
            if worker.stepper.error is not None:
                raise worker.stepper.error

    @invariant()
    def nothing_is_written_twice(self):
        counts = Counter(path for path, _ in self.store.writes if "/lease/" not in path)
        assert not [path for path, count in counts.items() if count > 1]

    @invariant()
    def every_truth_rests_on_the_truth(self):
        root = self.store.root()
        revisions, every = read_revisions(root, "run"), {}
        for revision in revisions.numbers:
            before, ended = None, False
            for number in range(STAGES):
                found = find(root, "run", number, Stage.TRAIN, revisions.seen(revision))
                if found is None:
                    ended = True  # stages behind one that was redone are not done
                    continue
                assert not ended
                assert found.inputs == ({"before": before.digest} if before else {})
                every.setdefault(number, set()).add(found.digest)
                before = found
        for worker in self.living():
            assert all(digest in every[number] for number, digest in worker.used.items())

    @invariant()
    def a_head_is_chosen_once_its_stage_is_done(self):
        revisions = read_revisions(self.store.root(), "run")
        assert [one.revision for one in revisions.reruns] == [*revisions.numbers][1:]
        for choice in revisions.choices:
            rerun = revisions.rerun(choice.revision)
            done = find(self.store.root(), "run", rerun.iteration, rerun.stage, revisions.seen(choice.revision))
            assert done is not None
            assert done.revision == choice.revision

    @invariant()
    def no_number_counts_twice(self):
        entries = [json.loads(data) for path, data in self.store.writes if "/lease/" in path]
        counting = []
        for entry in entries:
            if not counting or entry["number"] > counting[-1]["number"]:
                counting.append(entry)
        assert [entry["number"] for entry in counting] == list(range(1, len(counting) + 1))
        epochs = [entry["epoch"] for entry in counting]
        assert epochs == sorted(epochs)
        # no process takes an entry under a number that was freed for the lease
        for worker in self.holding():
            ours = worker.lease._entry
            assert counting[ours.number - 1]["token"] == ours.token

    @invariant()
    def the_newest_entry_is_there(self):
        numbers = [json.loads(data)["number"] for path, data in self.store.writes if "/lease/" in path]
        assert log.newest_number(self.store.root(), "run") == max(numbers, default=None)

    @invariant()
    def their_times_do_not_overlap(self):
        in_time = [one for one in self.holding() if self.time.now - one.lease._confirmed < SECONDS]
        assert len(in_time) <= 1

    def holding(self):
        return [
            one for one in self.living() if one.lease is not None and not one.stepper.ended and one.lease.lost is None
        ]

    def teardown(self):
        for worker in self.living():
            worker.stepper.kill()
            assert worker.stepper.ended
        self.patched.undo()


NeverTwoTruths.TestCase.settings = settings(
    max_examples=300, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_never_two_truths = pytest.mark.slow(NeverTwoTruths.TestCase)


def test_a_run_is_finished_by_whoever_is_left():
    # not only safe: after any crash, one process alone reaches the end
    for killed_after in range(60):
        store, time = SharedStore(), Time()
        first, second = (Worker(store, time, name, 0.0, 1) for name in ("first", "second"))
        first.start()
        for _ in range(killed_after):
            first.stepper.step()
        first.stepper.kill()
        second.start()
        while not second.stepper.ended:
            second.stepper.step()
            time.pass_by(SECONDS / 20)
        assert second.stepper.error is None
        keys = [layout.manifest_key("run", number, Stage.TRAIN, 0) for number in range(STAGES)]
        assert store.root().keys("run/manifests") == keys


def test_a_store_that_was_away_for_everybody_gives_its_holder_time():
    store, time = SharedStore(), Time()
    first = acquire(store.root(), "run", elsewhere("first"), SECONDS, time.clock())
    second = Worker(store, time, "second", 0.0, 0)
    second.start()
    second.stepper.step_to_write()  # it has seen the entry and waits
    second.stepper.step()
    time.pass_by(3 * SECONDS)  # its look is that slow
    second.stepper.step_to_write()
    time.pass_by(SECONDS / 2)
    second.stepper.step_to_write()
    assert second.lease is None
    first.renew()
    second.stepper.step_to_write()
    assert second.stepper.ended
    first.check()


def test_what_was_asked_is_done_again_by_whoever_is_left():
    heads = set()
    for killed_after in range(0, 90, 3):
        store, time = SharedStore(), Time()
        done = Worker(store, time, "done", 0.0, 1)
        done.start()
        while not done.stepper.ended:
            done.stepper.step()
        first, second = Worker(store, time, "first", 0.0, 1, again=1), Worker(store, time, "second", 0.0, 1)
        first.start()
        for _ in range(killed_after):
            first.stepper.step()
        first.stepper.kill()
        asked = len(read_revisions(store.root(), "run").reruns)
        second.start()
        while not second.stepper.ended:
            second.stepper.step()
            time.pass_by(SECONDS / 20)
        assert second.stepper.error is None
        revisions = read_revisions(store.root(), "run")
        assert revisions.head == len(revisions.choices) == asked
        assert [find(store.root(), "run", n, Stage.TRAIN).revision for n in range(STAGES)] == [0, asked, asked]
        heads.add(asked)
    assert heads == {0, 1}


def test_an_entry_that_is_removed_while_another_process_looks_for_it_ends_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "KEPT_ENTRIES", 1)
    monkeypatch.setattr(log, "_REMOVERS", 1)
    for steps in range(8):
        store, time = SharedStore(), Time()
        first, second = (Worker(store, time, name, 0.0, 1) for name in ("first", "second"))
        for one in (first, second):
            one.start()
            one.stepper.step_to_write()  # both have seen that no process drives the run
        first.stepper.step()
        for _ in range(steps):
            second.stepper.step()
        while not first.stepper.ended:
            first.stepper.step()
        while not second.stepper.ended:
            second.stepper.step()
            time.pass_by(SECONDS / 20)
        assert first.stepper.error is second.stepper.error is None
