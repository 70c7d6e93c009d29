"""The order of the stages, and that a continued run does only what is missing. The stages do nothing but commit."""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from prefect import flow
from rich.console import Console

from flows.run import advance, complete, next_iteration
from flows.views.progress import Progress
from storage.backends.root import Root
from storage.errors import LeaseHeld, StorageUnavailable, WorkerLost
from storage.manifest import Manifest, commit, find, need
from storage.ownership.lease import check_free, hold
from storage.write_behind import Outbox
from tasks.config.run import RunConfig
from tasks.stages import prefect_tasks as stages
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.prefect_tasks import StageTask
from tasks.stages.stage import StageOutput, StageResult

Done = list[tuple[int, Stage, bool]]
SENTENCE = {
    "prepare": Stage.PREPARE,
    "warm_up": Stage.TRAIN,
    "rollout": Stage.ROLLOUT,
    "reward": Stage.REWARD,
    "train": Stage.TRAIN,
    "weight_sync": Stage.WEIGHT_SYNC,
    "evaluate": Stage.EVALUATE,
}
FULL = [Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE]
BEGIN = [Stage.PREPARE, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Done:
    """Which stages ran, as (iteration, stage, reused)."""
    calls: Done = []

    def committing(stage: Stage) -> Callable[..., StageResult]:
        def body(context: RunContext, iteration: int, *inputs: Manifest) -> StageResult:
            named = {f"{item.stage}-{item.iteration}": item for item in inputs}
            result = context.stage(iteration, stage, named, lambda _writer: StageOutput())
            calls.append((iteration, stage, result.reused))
            return result

        return body

    for name, stage in SENTENCE.items():
        monkeypatch.setattr(stages, name, StageTask(stage, committing(stage)))
    return calls


@pytest.fixture
def context(root: Root, config: RunConfig, tmp_path: Path) -> RunContext:
    return RunContext("a", root, config, fleet=cast("Any", None), scratch=tmp_path)


def drive(context: RunContext, iterations: int) -> None:
    """Do what is missing up to `iterations`, in a real flow run."""
    section = context.config.run.model_copy(update={"iterations": iterations})
    config = context.config.model_copy(update={"run": section})
    asked = replace(context, config=config)

    @flow(name="test", persist_result=False)
    def body() -> None:
        first = next_iteration(asked.root, asked.run, asked.config)
        if first <= iterations:
            with Progress(asked.run, iterations, Console(file=io.StringIO())) as progress:
                advance(asked, progress, first)

    body()


def test_a_new_run_does_every_stage_in_order(prefect_api: str, context: RunContext, done: Done):
    drive(context, 2)
    expected = [(0, stage, False) for stage in BEGIN] + [(n, stage, False) for n in (1, 2) for stage in FULL]
    assert done == expected


def test_every_stage_is_made_from_the_manifests_before_it(prefect_api: str, context: RunContext, done: Done):
    drive(context, 2)
    inputs = {stage: set(need(context.root, "a", 2, stage).inputs) for stage in FULL}
    assert inputs == {
        Stage.ROLLOUT: {"prepare-0", "weight-sync-1"},
        Stage.REWARD: {"prepare-0", "rollout-2"},
        Stage.TRAIN: {"prepare-0", "rollout-2", "reward-2", "train-1"},
        Stage.WEIGHT_SYNC: {"prepare-0", "train-2"},
        Stage.EVALUATE: {"prepare-0", "weight-sync-2"},
    }


def test_a_complete_run_does_nothing_more(prefect_api: str, context: RunContext, done: Done):
    drive(context, 2)
    done.clear()
    drive(context, 2)
    assert done == []


def test_a_run_is_prolonged_without_a_look_at_what_is_finished(prefect_api: str, context: RunContext, done: Done):
    drive(context, 2)
    done.clear()
    drive(context, 3)
    assert done == [(3, stage, False) for stage in FULL]


def test_an_interrupted_iteration_goes_on_at_its_first_missing_stage(
    prefect_api: str, context: RunContext, done: Done, monkeypatch: pytest.MonkeyPatch
):
    train = stages.train

    def die(_context: RunContext, _iteration: int, *_inputs: Manifest) -> StageResult:
        raise WorkerLost("a trainer rank died")

    drive(context, 1)
    monkeypatch.setattr(stages, "train", StageTask(Stage.TRAIN, die))
    with pytest.raises(WorkerLost, match="a trainer rank died"):
        drive(context, 2)
    monkeypatch.setattr(stages, "train", train)
    done.clear()
    drive(context, 2)
    assert done == [(2, stage, stage in (Stage.ROLLOUT, Stage.REWARD)) for stage in FULL]


def small_room(tmp_path: Path):
    """A room without Ray, for stages that compute nothing."""

    @contextmanager
    def room(name, root, config, lease) -> Iterator[RunContext]:
        with Outbox() as outbox:
            yield RunContext(name, root, config, cast("Any", None), tmp_path, lease, outbox)

    return room


def do_all(context: RunContext, iterations: int, room) -> None:
    section = context.config.run.model_copy(update={"iterations": iterations})
    config = context.config.model_copy(update={"run": section})

    @flow(name="test", persist_result=False)
    def body() -> None:
        with Progress(context.run, iterations, Console(file=io.StringIO())) as progress:
            complete(context.run, context.root, config, progress, room)

    body()


def stage_of(stage: Stage, output: Callable[[], StageOutput]) -> StageTask:
    def body(context: RunContext, iteration: int, *inputs: Manifest) -> StageResult:
        named = {f"{item.stage}-{item.iteration}": item for item in inputs}
        return context.stage(iteration, stage, named, lambda _writer: output())

    return StageTask(stage, body)


def test_what_the_former_driver_published_late_counts(
    prefect_api: str, context: RunContext, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    late: list[Manifest] = []

    def output() -> StageOutput:
        if not late:  # while this process works, the one that it took the run over from publishes another result
            inputs = {f"rollout-{1}": need(context.root, "a", 1, Stage.ROLLOUT)}
            inputs["prepare-0"] = need(context.root, "a", 0, Stage.PREPARE)
            digests = {role: manifest.digest for role, manifest in inputs.items()}
            given = {"stage": Stage.REWARD, "inputs": digests, "facts": {"whose": "theirs"}}
            late.append(commit(context.root, inputs["rollout-1"].model_copy(update={**given, "epoch": 0})))
        return StageOutput(facts={"whose": "ours"})

    monkeypatch.setattr(stages, "reward", stage_of(Stage.REWARD, output))
    do_all(context, 2, small_room(tmp_path))
    assert need(context.root, "a", 1, Stage.REWARD) == late[0]
    assert need(context.root, "a", 1, Stage.TRAIN).inputs["reward-1"] == late[0].digest
    assert need(context.root, "a", 2, Stage.REWARD).facts["whose"] == "ours"


def test_a_rollout_begins_while_the_state_is_being_stored_and_is_committed_after_it(
    prefect_api: str, context: RunContext, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sampled, seen = threading.Event(), list[list[Stage]]()

    def committed() -> list[Stage]:
        return [stage for stage in (*FULL[2:],) if find(context.root, "a", 1, stage) is not None]

    def upload() -> None:
        assert sampled.wait(60), "the second rollout waits for the upload of the first state"

    def train() -> StageOutput:
        return StageOutput(store=upload if not sampled.is_set() else None)

    def rollout(context: RunContext, iteration: int, *inputs: Manifest) -> StageResult:
        def body(_writer) -> StageOutput:
            if iteration == 2:
                seen.append(committed())
                sampled.set()
                context.outbox.settle()
                seen.append(committed())
            return StageOutput()

        named = {f"{item.stage}-{item.iteration}": item for item in inputs}
        return context.stage(iteration, Stage.ROLLOUT, named, body)

    monkeypatch.setattr(stages, "train", stage_of(Stage.TRAIN, train))
    monkeypatch.setattr(stages, "rollout", StageTask(Stage.ROLLOUT, rollout))
    do_all(context, 2, small_room(tmp_path))
    assert seen == [[], FULL[2:]]


def test_a_state_that_cannot_be_stored_stops_the_run_and_nothing_made_from_it_is_committed(
    prefect_api: str, context: RunContext, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def upload() -> None:
        raise StorageUnavailable("no space left")

    monkeypatch.setattr(stages, "train", stage_of(Stage.TRAIN, lambda: StageOutput(store=upload)))
    with pytest.raises(StorageUnavailable, match="no space left"):
        do_all(context, 2, small_room(tmp_path))
    assert find(context.root, "a", 1, Stage.REWARD) is not None
    assert all(find(context.root, "a", 1, stage) is None for stage in FULL[2:])


def test_a_run_that_is_driven_is_refused_before_anything_starts(root: Root):
    with hold(root, "a", "ratchet run"), pytest.raises(LeaseHeld, match="which is running"):
        check_free(root, "a")
    check_free(root, "a")
