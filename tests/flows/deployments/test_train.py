"""What a deployment refuses, waits for and says; the flow itself runs in tests/flows/site."""

import time
from pathlib import Path

import pytest
from prefect.states import AwaitingRetry, Completed, Crashed, Running, Scheduled

from flows.deployments.crashes import AGAIN, LIMIT, crashes
from flows.deployments.explaining import explained
from flows.deployments.train import is_absolute, target, waiting
from storage import errors
from storage.errors import InputError, LeaseHeld, LeaseLost


def history(*states):
    """States in the order of time."""
    return [
        state.model_copy(update={"timestamp": state.timestamp.replace(year=2000 + n)}) for n, state in enumerate(states)
    ]


AUTOMATIC, BY_HAND = Scheduled(name=AGAIN), AwaitingRetry()


@pytest.mark.parametrize(
    ("states", "count"),
    [
        ((Scheduled(), Running()), 0),
        ((Scheduled(), Running(), Crashed(), AUTOMATIC, Running()), 1),
        ((Scheduled(), Running(), Crashed(), AUTOMATIC, AUTOMATIC, AUTOMATIC, Running()), 1),
        ((Scheduled(), *[Running(), Crashed(), AUTOMATIC] * (LIMIT + 1), Running()), LIMIT + 1),
        ((Scheduled(), *[Running(), Crashed(), AUTOMATIC] * LIMIT, BY_HAND, Running()), 0),
    ],
)
def test_crashes_count_since_a_person_asked(states, count):
    assert crashes(history(*states)) == count
    assert crashes(history(*states)[::-1]) == count


@pytest.mark.parametrize(
    ("place", "expected"),
    [("/data", True), ("file:///data", True), ("s3://bucket/a", True), ("runs", False), ("file://./runs", False)],
)
def test_a_place_means_the_same_everywhere(place, expected):
    assert is_absolute(place) is expected


@pytest.mark.parametrize(("iterations", "more"), [(None, None), (1, 1)])
def test_the_goal_is_given_once(iterations, more, tmp_path: Path):
    with pytest.raises(InputError, match="either iterations"):
        target("a", str(tmp_path), iterations, more)


def test_more_counts_from_what_is_complete(tmp_path: Path, make_run, root):
    assert target("new", root.url, None, 3) == 3
    make_run("a", 2, begun=())
    assert target("a", root.url, None, 3) == 5
    assert target("a", root.url, 4, None) == 4


def test_a_held_lease_is_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    said: list[str] = []
    held = [LeaseHeld("driven by someone"), LeaseHeld("driven by someone")]

    def work():
        if held:
            raise held.pop()
        return Completed()

    assert waiting(work, time.monotonic() + 60, said.append).is_completed()
    assert said == ["driven by someone. Waiting for it"]

    def never():
        raise LeaseHeld("driven by someone")

    state = waiting(never, time.monotonic(), said.append)
    assert state.is_cancelled()
    assert state.message == "driven by someone"


def test_a_run_that_was_taken_over_is_not_taken_back():
    calls: list[int] = []

    def work():
        calls.append(1)
        raise LeaseLost("taken over by another")

    state = waiting(work, time.monotonic() + 60, lambda _: None)
    assert (state.is_cancelled(), state.message, calls) == (True, "taken over by another", [1])


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("InputError", "Retry alone cannot help"),
        ("StorageUnavailable", "The store refuses"),
        ("StorageInterrupted", "press Retry once it does"),
        ("WorkerLost", "press Retry to try again"),
        ("NumericsError", "learning rate"),
        ("StageFailed", "Correct what is named"),
        ("PartMissing", "ratchet verify"),
    ],
)
def test_a_person_reads_what_happened_what_is_kept_and_what_to_do(kind, advice):
    text = explained(vars(errors)[kind]("reward of iteration 3 failed"), "a", "s3://user:geheim@bucket/runs")
    for words in ("reward of iteration 3 failed", "bucket/runs/a", "Retry repeats only the stage", advice):
        assert words in text
    assert "geheim" not in text


def test_a_person_reads_the_stage_what_happened_beside_it_and_how_to_need_less_memory():
    error = errors.WorkerLost("rank 0 failed in train_policy and was ended: OutOfMemoryError: CUDA out of memory")
    error.during, error.beside = "train of iteration 3", "What was still to be stored is not: no space left"
    text = explained(error, "a", "/data/runs")
    for words in ("During train of iteration 3: rank 0 failed", "no space left", "lower train.micro_batch_size"):
        assert words in text
    error.during = "train_policy"  # which the message says
    assert explained(error, "a", "/data/runs").startswith("rank 0 failed")
