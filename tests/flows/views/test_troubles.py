"""Progress, status and summary name an iteration from which nothing can be learned."""

import io

import pytest
from rich.console import Console

from flows.views.artifacts import summary
from flows.views.history import EXPLANATIONS, Trouble, record_of, run_troubles, troubles_of
from flows.views.progress import Progress, iteration_line, status_lines
from flows.views.status import read_status
from storage.backends.root import Root
from storage.manifest import commit
from tasks.stages.names import Stage
from tests.flows.runs import MakeRun, make_manifest

FINE = {
    Stage.ROLLOUT: {"truncated": 0.5, "tokens": 9.0},
    Stage.REWARD: {"equal_groups": 0.9, "reward_mean": 0.5},
    Stage.TRAIN: {"grad_norm": 0.1},
}


def with_metric(stage: Stage, name: str, value: float | None) -> dict:
    return {**FINE, stage: {**FINE[stage], name: value}}


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        (FINE, ()),
        ({}, ()),
        ({Stage.TRAIN: {"grad_norm": 0.0}}, ()),  # a warm-up of no steps
        (with_metric(Stage.REWARD, "equal_groups", 1.0), (Trouble.EQUAL_GROUPS,)),
        (with_metric(Stage.TRAIN, "grad_norm", 0.0), (Trouble.ZERO_GRADIENT,)),
        (with_metric(Stage.TRAIN, "grad_norm", None), ()),
        (with_metric(Stage.ROLLOUT, "truncated", 1.0), (Trouble.TRUNCATED,)),
    ],
)
def test_each_sign_is_seen_in_the_metrics(metrics, found):
    assert troubles_of(metrics) == found


def test_the_run_says_how_often_and_whether_a_response_ever_ended():
    lines = run_troubles([(1, (Trouble.TRUNCATED,)), (2, (Trouble.TRUNCATED, Trouble.EQUAL_GROUPS)), (3, ())])
    assert [line.partition(":")[0] for line in lines] == ["1 of 3 iterations, last 2", "2 of 3 iterations, last 2"]
    assert EXPLANATIONS[Trouble.TRUNCATED] in lines[1]
    (line,) = run_troubles([(1, (Trouble.TRUNCATED,)), (2, (Trouble.TRUNCATED,))])
    assert "no response has ever ended with a stop token" in line
    assert run_troubles([(1, ())]) == ()


def test_it_is_shown_where_people_look(make_run: MakeRun, root: Root):
    make_run("a", 1)
    for stage, metrics in {Stage.ROLLOUT: {"truncated": 1.0}, Stage.REWARD: {"errors": 2.0, "timeouts": 1.0}}.items():
        one = make_manifest("a", 2, stage)
        commit(root, one.model_copy(update={"metrics": {**one.metrics, **metrics}}))
    status = read_status(root, "a")
    (warning,) = status.warnings
    assert warning.startswith("1 of 2 iterations, last 2: every response was cut off")
    assert f"{'warning':<22}{warning}" in status_lines(status)
    assert f"**Warning:** {warning}" in summary(status)
    text = io.StringIO()
    Progress("a", 4, Console(file=text, width=300)).finished(status.history[2])
    first, second = text.getvalue().splitlines()
    assert "without reward 3 (errors 2, timeouts 1)" in first
    assert second == f"warning: iteration 2: {EXPLANATIONS[Trouble.TRUNCATED]}"


def test_a_figure_that_is_not_there_is_not_shown():
    one = make_manifest("a", 1, Stage.TRAIN)
    record = record_of([one.model_copy(update={"metrics": {"loss": 0.1}})], None)
    assert (record.kl, record.grad_norm) == (None, None)
    assert "KL" not in iteration_line(record, 4)
