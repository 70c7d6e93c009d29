"""Refusals, waits and messages of a deployment; the flow itself runs in tests/flows/site."""

import logging
import time

import pytest
from prefect.exceptions import CancelledRun, FailedRun
from prefect.states import Completed

from flows.deployments.attempt import check_places, explained, failure_text, is_absolute, waiting
from flows.deployments.process import is_ours
from flows.deployments.runs import check_goal
from storage import errors
from storage.errors import InputError, LeaseHeld, LeaseLost


@pytest.mark.parametrize(
    ("place", "expected"),
    [("/data", True), ("file:///data", True), ("s3://bucket/a", True), ("runs", False), ("file://./runs", False)],
)
def test_a_place_means_the_same_everywhere(place, expected):
    assert is_absolute(place) is expected


@pytest.mark.parametrize(("iterations", "more"), [(None, None), (1, 1)])
def test_the_goal_is_given_once(iterations, more):
    with pytest.raises(InputError, match="either iterations"):
        check_goal("a", iterations, more)


@pytest.mark.parametrize("places", [{"root": "runs"}, {"config": "a.toml"}, {"root": "s3://user:geheim@bucket/runs"}])
def test_a_place_that_means_something_else_elsewhere_or_holds_a_secret_is_refused(places):
    with pytest.raises(InputError, match=r"absolute path|credentials") as refused:
        check_places(places)
    assert "geheim" not in str(refused.value)


def test_a_held_lease_is_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    said: list[str] = []
    held = [LeaseHeld("driven by someone"), LeaseHeld("driven by someone")]

    def work():
        if held:
            raise held.pop()
        return Completed()

    assert waiting("a", work, time.monotonic() + 60, said.append).is_completed()
    assert said == ["driven by someone. Waiting for it"]

    def never():
        raise LeaseHeld("driven by someone")

    state = waiting("a", never, time.monotonic(), said.append)
    assert state.is_cancelled()
    assert state.message == "driven by someone"


def test_a_run_that_was_taken_over_is_not_taken_back():
    calls: list[int] = []

    def work():
        calls.append(1)
        raise LeaseLost("taken over by another")

    state = waiting("a", work, time.monotonic() + 60, lambda _: None)
    assert (state.is_cancelled(), state.message, calls) == (True, "taken over by another", [1])


KEPT = "Everything that was committed is kept in s3://***@bucket/runs/a; "


@pytest.mark.parametrize(
    ("error", "during", "kept", "first"),
    [
        (InputError("no model"), None, "No stage was begun, and nothing in", "Retry alone cannot help"),
        (InputError("no model"), "train", f"{KEPT}once that is done, Retry goes on", "Retry alone cannot help"),
        (errors.StorageUnavailable("full"), "train", f"{KEPT}once that is done, Retry", "The store refuses"),
        (errors.StorageInterrupted("away"), "train", f"{KEPT}Retry goes on", "press Retry once it does"),
        (errors.WorkerLost("engine 0 died: out of memory"), "rollout", f"{KEPT}Retry goes on", "press Retry to try"),
        (errors.OutOfMemory("rank 0 failed"), "train", f"{KEPT}once that", "lower train.micro_batch_size"),
        (MemoryError("array"), None, f"{KEPT}once that", "lower train.micro_batch_size"),
        (errors.NumericsError("loss is nan"), "train", f"{KEPT}once that", "learning rate"),
        (errors.StageFailed("reward"), "reward", f"{KEPT}once that", "Correct the cause"),
        (errors.SyncMismatch("w"), "weight-sync", f"{KEPT}Retry goes on", "[sync]"),
        (errors.PartMissing("p"), "train", f"{KEPT}once that", "ratchet verify"),
        (errors.WrongRecord("p"), "train", f"{KEPT}once that", "ratchet verify"),
        (errors.SchemaMismatch("p"), None, f"{KEPT}once that", "with the version of Ratchet"),
        (errors.CommitConflict("p"), "train", f"{KEPT}Retry goes on", "Press Retry to continue"),
    ],
)
def test_cause_and_advice_follow_from_the_type_of_the_error_not_from_its_words(error, during, kept, first):
    if during is not None:
        error.during = during
    why = explained(error, "a", "s3://user:geheim@bucket/runs", "goes on")
    assert (why.stage, str(error) in why.cause) == (during, True)
    assert why.kept.startswith(kept)
    assert first in why.first
    assert why.message.startswith(f"During {during}: " if during and during not in str(error) else why.cause)
    assert "geheim" not in why.message


def test_a_person_reads_the_stage_what_happened_beside_it_and_how_to_need_less_memory():
    error = errors.OutOfMemory("rank 0 failed in train_policy and was ended: OutOfMemoryError: CUDA out of memory")
    error.during, error.beside = "train of iteration 3", "What was still to be stored is not: no space left"
    text = explained(error, "a", "/data/runs", "goes on").message
    for words in ("During train of iteration 3: rank 0 failed", "no space left", "lower train.micro_batch_size"):
        assert words in text
    error.during = "train_policy"  # the message names the stage
    assert explained(error, "a", "/data/runs", "goes on").message.startswith("rank 0 failed")
    page = failure_text(explained(error, "a", "/data/runs", "goes on"), ["a `line`", "the | last"])
    for words in ("| cause | rank 0 failed", "<br>What was still", "| stage | train_policy |", "the | last\n```"):
        assert words in page


@pytest.mark.parametrize(
    ("path", "level", "ours"),
    [
        ("/site-packages/prefect/flow_engine.py", logging.INFO, False),
        ("/site-packages/prefect/flow_engine.py", logging.WARNING, True),
        ("/opt/ratchet/flows/subflows.py", logging.INFO, True),
        ("/opt/ratchet/flows/deployments/attempt.py", logging.INFO, True),
    ],
)
def test_the_log_of_a_flow_run_holds_no_information_of_prefect_about_itself(path: str, level: int, ours: bool):
    assert is_ours(logging.makeLogRecord({"pathname": path, "levelno": level})) is ours


@pytest.mark.parametrize(
    ("error", "ours"), [(FailedRun("red"), False), (CancelledRun("stopped"), False), (ValueError("unforeseen"), True)]
)
def test_the_message_of_a_failure_ends_the_log(error: Exception, ours: bool):
    """Prefect's engine would add a traceback that ends in the same message."""
    record = {"pathname": "/site-packages/prefect/flow_engine.py", "levelno": logging.ERROR}
    assert is_ours(logging.makeLogRecord({**record, "exc_info": (type(error), error, None)})) is ours
