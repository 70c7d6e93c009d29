"""Place where a run continues, and the content of its manifests about each iteration."""

from dataclasses import dataclass, field

import pytest

from flows.views.history import ended_iterations, next_iteration, read_history, record_of, seconds_per_iteration
from storage.backends.root import Root
from tasks.config.run import RunConfig
from tasks.stages.names import Stage
from tests.flows.runs import MakeRun, make_manifest
from tests.small.config import small_config


def asked(iterations: int, every: int = 1) -> RunConfig:
    return small_config([f"run.iterations={iterations}", f"evaluate.every={every}"])


@pytest.mark.parametrize("complete", [-1, 0, 1, 3, 6])
@pytest.mark.parametrize("iterations", [0, 3, 6])
def test_a_run_goes_on_after_its_last_complete_iteration(make_run: MakeRun, root: Root, complete: int, iterations: int):
    make_run("a", complete)
    assert next_iteration(root, "a", asked(iterations)) == min(complete, iterations) + 1


@pytest.mark.parametrize(
    "begun",
    [(), (Stage.ROLLOUT,), (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN)],
    ids=["nothing", "rollout", "train"],
)
def test_a_begun_iteration_is_not_complete(make_run: MakeRun, root: Root, begun: tuple[Stage, ...]):
    make_run("a", 2, begun)
    assert next_iteration(root, "a", asked(5)) == 3


@pytest.mark.parametrize(
    ("every", "iterations", "expected"),
    [
        (1, 5, 3),  # due after each iteration
        (0, 5, 4),  # never
        (2, 5, 4),  # 3 is odd and not the last
        (2, 3, 3),  # due because it is the last
    ],
)
def test_an_evaluation_that_is_due_keeps_an_iteration_incomplete(
    make_run: MakeRun, root: Root, every: int, iterations: int, expected: int
):
    make_run("a", 3, unevaluated=(3,))
    assert next_iteration(root, "a", asked(iterations, every)) == expected


def test_a_run_that_went_further_is_complete(make_run: MakeRun, root: Root):
    make_run("a", 6, unevaluated=(4,))
    assert next_iteration(root, "a", asked(4)) == 5


@dataclass(frozen=True)
class CountingRoot(Root):
    reads: list[str] = field(default_factory=list)

    def read_bytes(self, key: str) -> bytes:
        self.reads.append(key)
        return super().read_bytes(key)


def test_finding_the_place_takes_few_look_ups(make_run: MakeRun, root: Root):
    make_run("a", 100)
    counting = CountingRoot(root.url, root.backend)
    assert ended_iterations(counting, "a", 1_000_000) == 101
    assert len(counting.reads) < 60


def test_an_iteration_shows_its_figures():
    manifests = [make_manifest("a", 1, stage) for stage in (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN)]
    record = record_of(manifests, None)
    assert (record.reward, record.kl, record.grad_norm, record.tokens_per_second) == (0.5, 2e-3, 3.0, 2000.0)
    assert (record.held_out_reward, record.pass_rate) == (None, None)
    assert record.done == (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN)
    assert record.seconds == 3.0


def test_the_time_between_two_iterations_counts_only_within_one_process(make_run: MakeRun, root: Root):
    make_run("a", 2)
    history = read_history(root, "a")
    # stages of an iteration fill 5 of its 10 s; those of the preparation 4
    assert [record.seconds for record in history] == [4.0, 11.0, 10.0]
    other = [make_manifest("a", 3, stage, writer="host:2") for stage in (Stage.ROLLOUT, Stage.REWARD)]
    assert record_of(other, make_manifest("a", 2, Stage.EVALUATE)).seconds == 2.0


def test_the_median_duration_leaves_out_the_first_two(make_run: MakeRun, root: Root):
    make_run("a", 5)
    history = read_history(root, "a")
    assert len(history) == 6
    assert seconds_per_iteration(history) == 10.0
    assert seconds_per_iteration(history[:2]) == 11.0
    assert seconds_per_iteration(history[:1]) is None


def test_a_long_history_is_read_whole(make_run: MakeRun, root: Root):
    make_run("a", 40, (Stage.ROLLOUT,))
    history = read_history(root, "a")
    assert [record.iteration for record in history] == list(range(42))
    assert history[-1].done == (Stage.ROLLOUT,)


def test_the_absence_of_a_process_is_not_part_of_an_iteration():
    # the first process ended after the reward, the second came back 100 s later
    first = [make_manifest("a", 1, stage) for stage in (Stage.ROLLOUT, Stage.REWARD)]
    later = make_manifest("a", 11, Stage.TRAIN, writer="host:2").model_copy(update={"iteration": 1})
    assert record_of([*first, later], None).seconds == 3.0
