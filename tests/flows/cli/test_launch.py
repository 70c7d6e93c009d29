"""The command as a process: its messages, and the processes that an interruption leaves."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from flows.cli import launch
from flows.cli.app import DEMO_CONFIG
from flows.views.output import Output
from flows.views.status import read_status
from storage.backends.root import Root
from tasks.config.run import RunConfig
from tests.flows.runs import MakeRun
from tests.forked_python import forked_python, of_workers, own, tree

PROJECT = Path(__file__).resolve().parents[3]
DEADLINE_S = 600.0  # only ends what hangs


def wait_for(path: Path, text: str, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while text not in path.read_text():
        assert process.poll() is None, path.read_text()
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            3,
            "nothing to do: 3 iterations asked for, and run a already has 10; --iterations 11 or more continues it",
        ),
        (10, "nothing to do: run a already has all 10 iterations; --iterations 11 or more continues it"),
    ],
)
def test_a_complete_run_says_why_it_does_nothing(make_run: MakeRun, root: Root, asked: int, said: str):
    make_run("a", 10)
    assert launch.nothing_done(read_status(root, "a"), asked, retrains=False) == said


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_leaves_no_process_and_says_how_to_go_on(
    prefect_home: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    root, log = f"file://{tmp_path}/runs", tmp_path / "stderr"
    python = forked_python(tmp_path_factory)
    options = ["--run", "a", "--root", root, "--set", "warmup.steps=5000", "--json"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [python, "-m", "flows", "run", str(DEMO_CONFIG), *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=PROJECT,
            env={**os.environ, **of_workers(Path(python))},
        )
    wait_for(log, "iteration 0: train", process)
    command = own(psutil.Process(process.pid))
    below = tree(command)[1:]
    assert len(below) > 3, "the server, Ray and the workers"
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does: a forked command has a process group of its own
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive
    assert output == ""
    last = log.read_text().splitlines()[-1]
    assert last.startswith(
        "ratchet: interrupted. Nothing that was committed is lost; continue with: python -m ratchet run "
    )
    assert last.endswith(f"--run=a --set=warmup.steps=5000 --root={root} --json")
    assert "Traceback" not in log.read_text()


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("interrupted", [True, False])
def test_an_error_that_an_interrupt_became_is_an_interrupt(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
):
    def flow(*_: object) -> None:
        # as Prefect does when it is interrupted at the start of a task run
        try:
            if interrupted:
                os.kill(os.getpid(), signal.SIGINT)
        finally:
            raise ValueError("Task run is not set")

    monkeypatch.setattr(launch, "_run_flow", flow)
    order = launch.Order(config, "a", str(tmp_path / "runs"), "the same command")
    if interrupted:
        assert launch.launch(order, Output()) == 130
    else:
        with pytest.raises(ValueError, match="Task run is not set"):
            launch.launch(order, Output())
