"""What is printed for each iteration."""

import io

import pytest
from rich.console import Console

from flows.views.history import read_history
from flows.views.progress import Progress, iteration_line, status_lines
from flows.views.status import read_status
from storage.backends.root import Root
from tasks.stages.names import Stage
from tests.flows.runs import MakeRun


def test_an_iteration_is_one_line_with_every_figure(make_run: MakeRun, root: Root):
    make_run("a", 1)
    line = iteration_line(read_history(root, "a")[1], 20)
    assert line == (
        "iteration  1/20 | reward 0.500 | held-out reward 1.000 | KL before||after 2.00e-03 | entropy 1.800 | "
        "grad norm 3.000 | tokens/s 2000 | 11.0 s (rollout 1.0 reward 1.0 train 1.0 weight-sync 1.0 evaluate 1.0)"
    )


@pytest.mark.parametrize(("asked", "shown"), [(6, "8/8"), (8, "8/8"), (10, " 8/10")])
def test_an_iteration_is_never_beyond_those_there_are_to_be(make_run: MakeRun, root: Root, asked: int, shown: str):
    make_run("a", 8)
    assert iteration_line(read_history(root, "a")[8], asked).startswith(f"iteration {shown} |")
    lines = status_lines(read_status(root, "a"))  # started with 4
    assert [line.partition(" |")[0] for line in lines[:9]] == [f"iteration {number}/8" for number in range(9)]


def test_where_there_is_no_terminal_the_lines_are_plain_and_whole(make_run: MakeRun, root: Root):
    make_run("a", 1)
    text = io.StringIO()
    with Progress("a", 4, Console(file=text, width=40)) as progress:
        progress.begins(0, Stage.PREPARE)
        progress.begins(1, Stage.ROLLOUT)
        progress.finished(read_history(root, "a")[1])
    lines = text.getvalue().splitlines()
    assert lines == ["iteration 0: prepare", iteration_line(read_history(root, "a")[1], 4)]


def test_a_terminal_shows_the_stage_in_work():
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=True)
    with Progress("a", 4, console) as progress:
        progress.begins(3, Stage.TRAIN)
        progress.refresh()
    assert "iteration 3: train" in text.getvalue()
    assert "2/4" in text.getvalue()


def test_the_status_says_what_is_still_to_do(make_run: MakeRun, root: Root):
    make_run("a", 2, (Stage.ROLLOUT,))
    lines = status_lines(read_status(root, "a"))
    assert lines[-1].endswith("iteration 3: rollout done, reward to do, train to do, weight-sync to do, evaluate to do")
    assert sum(line.startswith("iteration") for line in lines) == 4
