"""Lines that are printed for each iteration."""

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from flows.views.history import read_history, record_of
from flows.views.progress import Progress, duration, iteration_line, status_lines
from flows.views.samples import Sample, Samples
from flows.views.status import read_status
from storage.backends.root import Root
from tasks.stages.names import Stage
from tests.flows.runs import MakeRun, make_manifest


def test_an_iteration_is_one_line_with_every_figure(make_run: MakeRun, root: Root):
    make_run("a", 1)
    line = iteration_line(read_history(root, "a")[1], 20)
    assert line == (
        "iteration  1/20 | reward 0.500 | held-out reward 1.000 | KL before||after 2.00e-03 | entropy 1.800 | "
        "grad norm 3.000 | tokens/s 2000 | 11.0 s (rollout 1.0 reward 1.0 train 1.0 weight-sync 1.0 evaluate 1.0)"
    )


def test_conversations_are_in_the_line():
    figures = {"turns_mean": 2.5, "environment_failures": 4.0}
    manifest = make_manifest("a", 1, Stage.ROLLOUT)
    record = record_of([manifest.model_copy(update={"metrics": {**manifest.metrics, **figures}})], None)
    assert "| turns 2.5 | environment failures 4 |" in iteration_line(record, 4)


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


def test_a_terminal_shows_the_time_left_of_the_run_and_a_sample_on_one_line(make_run: MakeRun, root: Root):
    make_run("a", 2)
    text, history = io.StringIO(), read_history(root, "a")
    with Progress("a", 9, Console(file=text, width=80, force_terminal=True)) as progress:
        for record in history[:3]:
            progress.finished(record)  # 11 s each, but for the preparation
        progress.sampled(samples("3+4=\n", "\x1b[2J7" + "9" * 200))
        progress.begins(3, Stage.ROLLOUT)
        text.truncate(text.seek(0))
        progress.refresh()
    shown = Text.from_ansi(text.getvalue()).plain
    assert re.search(r"2/9 iteration 3: rollout \d+ s \| 7\d s left", shown)
    sample = re.findall(r"iteration 2, reward.*", shown)[0].rstrip()
    assert sample.startswith(r"iteration 2, reward 0.5: 3+4= -> \x1b[2J7999")
    assert len(sample) <= 80


def test_where_there_is_no_terminal_samples_are_not_printed():
    text = io.StringIO()
    with Progress("a", 4, Console(file=text, width=40)) as progress:
        progress.sampled(samples("3+4=", "7"))
    assert text.getvalue() == ""


def samples(prompt: str, response: str) -> Samples:
    one = Sample(
        prompt_id="p", sample_id=0, prompt=prompt, response=response, reward=0.5, components=None, status="ok",
        detail=None, advantage=None, finish_reason="stop", tokens=2, weight_versions=(1,),
    )  # fmt: skip
    return Samples(root="r", run="a", iteration=2, total=1, samples=(one,))


def test_the_status_says_what_is_still_to_do(make_run: MakeRun, root: Root):
    make_run("a", 2, (Stage.ROLLOUT,))
    lines = status_lines(read_status(root, "a"))
    assert lines[-1].endswith("iteration 3: rollout done, reward to do, train to do, weight-sync to do, evaluate to do")
    assert sum(line.startswith("iteration") for line in lines) == 4


def test_a_warm_up_shows_step_loss_and_time_left_in_80_columns():
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=True)
    with Progress("a-run-with-a-rather-long-name-20261120-190512", 30, console) as it:
        it.begins(0, Stage.TRAIN)
        it.counted(100, 60000, "steps", "loss 2.345")
        it.counted(200, 60000, "steps", "loss 1.234")
        it.refresh()
        shown = next(line for line in reversed(text.getvalue().splitlines()) if "1.234" in line)
    plain = Text.from_ansi(shown).plain.rpartition("\r")[2]
    assert "iteration 0: train, 200 of 60000 steps, loss 1.234, " in plain
    assert plain.rstrip().endswith(" s")
    assert len(plain) <= 80


def test_a_log_has_lines_of_the_warm_up_too():
    text = io.StringIO()
    with Progress("a", 4, Console(file=text, width=200)) as progress:
        progress.begins(0, Stage.TRAIN)
        for done in range(20):
            progress.counted(done, 600, "steps", f"loss {done}")
            progress.counted(done, 600, "micro-batches")
    assert text.getvalue().splitlines() == ["iteration 0: train", "iteration 0: train, 0 of 600 steps, loss 0"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (119, "119 s"), (121, "2 min"), (7100, "118 min"), (7300, "2 h")]
)
def test_a_duration_is_short(seconds: float, shown: str):
    assert duration(seconds) == shown
