"""What a deployment refuses, waits for and says; the flow itself runs in tests/flows/site."""

import json
import re
import time
from pathlib import Path

import pytest
from prefect.states import AwaitingRetry, Completed, Crashed, Running, Scheduled
from prefect.utilities.callables import parameter_schema

from flows.deployments.crashes import AGAIN, LIMIT, crashes
from flows.deployments.explaining import explained
from flows.deployments.train import Tables, configured, is_absolute, target, waiting
from flows.deployments.train import train as train_flow
from storage import errors
from storage.errors import InputError, LeaseHeld, LeaseLost
from tests.flows.runs import MINIMAL


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
        ((Scheduled(), Running(), Crashed(), Crashed(), AUTOMATIC, Running()), 1),
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


def schema() -> dict:
    return parameter_schema(train_flow).model_dump_for_openapi()


def test_the_form_has_typed_fields_with_limits_and_none_for_a_secret():
    form = schema()["properties"]
    assert set(schema()["required"]) == {"run", "root"}
    for name in ("model", "data", "rollout", "reward", "train", "evaluate", "engine", "storage"):
        assert form[name]["title"] == name
        assert form[name]["properties"], name
        assert "required" not in form[name], name
        assert form[name]["default"] == {}  # the page sends the default of what is left empty
    prompts = form["rollout"]["properties"]["prompts"]
    assert (prompts["type"], prompts["minimum"]) == ("integer", 1)
    assert "Default: 32. Fixed once the run has begun." in prompts["description"]
    assert "Fixed" not in form["storage"]["properties"]["keep_newest"]["description"]
    assert not {"token", "generate"} & {*form["model"]["properties"], *form["data"]["properties"]}
    assert form["train"]["properties"]["optimizer"]["properties"]["decay"]["enum"] == ["constant", "linear", "cosine"]


NEW: Tables = {
    "model": {"generate": {"layers": 2}},
    "data": {"generate": {"held_out": 2}},
    "train": {"max_length": 128, "optimizer": {"learning_rate": 1e-3}},
}


def test_a_new_run_can_be_described_by_the_form_alone(root):
    made = configured("new", root.url, 3, None, ["rollout.samples=4"], {**NEW, "rollout": {"samples": 2, "prompts": 6}})
    assert (made.run.iterations, made.rollout.samples, made.rollout.prompts) == (3, 4, 6)
    assert made.model.generate is not None
    assert made.train.optimizer.learning_rate == 1e-3


def test_what_the_form_gives_replaces_what_is_recorded_or_in_a_file_and_nothing_else(make_run, root, tmp_path: Path):
    make_run("a", 1)
    before = configured("a", root.url, 4, None, [], {name: {} for name in NEW})
    after = configured("a", root.url, 4, None, [], {"storage": {"keep_newest": 2, "keep_every": None}, "engine": {}})
    assert after.storage.keep_newest == 2
    assert after.model_copy(update={"storage": before.storage}) == before
    untouched = {"engine": {}, "train": {"optimizer": {"learning_rate": None}, "policy": {}}}  # as a form may send it
    assert configured("a", root.url, 4, None, [], untouched) == before
    file = tmp_path / "config.toml"
    file.write_text(MINIMAL)
    assert configured("a", root.url, 4, str(file), [], {"rollout": {"prompts": 7}}).rollout.prompts == 7


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"rollout": {"prompts": 0}}, "rollout.prompts"),
        ({"rollout": {"promts": 3}}, "promts"),
        ({"model": {"generate": {"layers": 2}}}, "data"),
    ],
)
def test_a_form_that_cannot_work_names_the_field(root, given, fact):
    with pytest.raises(InputError, match=fact):
        configured("new", root.url, 1, None, [], {**NEW, **given} if "rollout" in given else given)


def test_a_switch_that_nobody_touches_sends_nothing(make_run, root):
    # the page sends false for each boolean of a form, touched or not
    assert not re.findall('"type": "boolean"', json.dumps(schema()))
    assert schema()["properties"]["data"]["properties"]["shuffle"]["enum"] == ["true", "false"]
    make_run("a", 1)
    changed = configured("a", root.url, 4, None, [], {"engine": {"cuda_graphs": "true"}})
    assert changed.engine.cuda_graphs is True


def test_a_person_reads_the_stage_what_happened_beside_it_and_how_to_need_less_memory():
    error = errors.WorkerLost("rank 0 failed in train_policy and was ended: OutOfMemoryError: CUDA out of memory")
    error.during, error.beside = "train of iteration 3", "What was still to be stored is not: no space left"
    text = explained(error, "a", "/data/runs")
    for words in ("During train of iteration 3: rank 0 failed", "no space left", "lower train.micro_batch_size"):
        assert words in text
    error.during = "train_policy"  # which the message says
    assert explained(error, "a", "/data/runs").startswith("rank 0 failed")
