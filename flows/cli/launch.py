"""One run from the command line: checks first, then the processes, then the flow, and the result at the end."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import psutil
from pydantic import BaseModel

from flows.cli.signals import Signals
from flows.driving import is_complete, tidy_complete
from flows.preflight import check_holes
from flows.run import process_cluster, ready, release_workers, run
from flows.server.temporary import connected, prefect_server
from flows.views.history import last_iteration, next_iteration
from flows.views.output import Output, count
from flows.views.progress import closing_lines
from flows.views.reports import finish_report
from flows.views.status import Changes, RunStatus, read_status
from storage.backends.root import Root
from storage.errors import InputError, RatchetError, WorkerLost, told
from tasks.config.run import RunConfig

_PERIOD_S = 2.0
Say = Callable[[str], object]


class MemoryMeter:
    """Samples the proportional set size (PSS) of the process tree: shared pages count once, however many map them."""

    def __init__(self, period_s: float = _PERIOD_S) -> None:
        self._period_s = period_s
        self._peak_bytes, self._begun = 0, time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-meter", daemon=True)

    @property
    def peak_gib(self) -> float:
        return self._peak_bytes / (1 << 30)

    @property
    def seconds(self) -> float:
        """Time since the meter was made, whatever happened to the clock."""
        return time.monotonic() - self._begun

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self._peak_bytes = max(self._peak_bytes, tree_bytes())
            if self._end.wait(self._period_s):
                return


def tree_bytes() -> int:
    """PSS of this process and all its descendants now, bytes."""
    own = psutil.Process()
    return sum(_pss(process) for process in [own, *own.children(recursive=True)])


def _pss(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:  # it ended meanwhile, or belongs to another user
        return 0


@dataclass(frozen=True)
class Order:
    config: RunConfig
    run: str
    root: str
    again: str  # the command that continues the run
    one_stage: bool = False  # do only the stage that was asked to be done again


class RunResult(BaseModel, frozen=True, extra="forbid"):
    """The result of `ratchet run` and `ratchet demo`, as JSON."""

    run: str
    root: str
    iterations: int  # RL iterations that are complete
    changes: Changes
    """Mean reward, held-out mean reward and held-out pass rate, from the first value to the last that compare."""
    seconds_total: float  # time of this call, without the imports before it
    seconds_per_iteration: float | None  # median duration of the RL iterations after the second
    peak_pss_gib: float  # largest proportional set size of this process and everything it started, GiB
    report: str | None


def launch(order: Order, output: Output) -> int:
    """Start or continue a run and report the result. Returns 0, or if interrupted 128 + the signal's number (130 for
    Ctrl-C). Raises the RatchetError that stops the run."""
    root = ready(order.run, order.root, order.config)  # before anything starts; the flow checks again
    signals = Signals()
    try:
        with signals:
            status, result = drive(order, root, output.say)
    except (KeyboardInterrupt, ValueError) as end:
        # Prefect turns an interrupt at the very start of a task run into a ValueError
        if not (signals.received or isinstance(end, KeyboardInterrupt)):
            raise
        output.error(f"interrupted. Nothing that was committed is lost; continue with: {order.again}")
        return signals.exit_code
    except InputError:
        raise
    except RatchetError as error:
        repair = f"Fix this, a wrong setting also in the command, then continue with: {order.again}"
        raise type(error)(f"{told(error)}\n{repair}") from error
    output.result(result, closing_lines(status))
    return 0


def drive(order: Order, root: Root, say: Say) -> tuple[RunStatus, RunResult]:
    """Do what is left of a run that is `ready`, in this process. Raises the RatchetError for which the run stopped."""
    _quieten_prefect()
    with MemoryMeter() as meter:
        if complete := is_complete(root, order.run, order.config):
            _release(order.run, root.url, say)
            tidy_complete(root, order.run, order.config, "ratchet run")
            finish_report(root, order.run, order.config, say)
        else:
            check_holes(order.run, root, order.config)  # the run does so too, once it has its lease
            first = next_iteration(root, order.run, order.config)
            begins = f"at iteration {first}" if first <= order.config.run.iterations else "what is to be done again"
            say(f"run {order.run} begins {begins}; starting Ray and Prefect")
            _run_flow(order, root, say)
    status = read_status(root, order.run)
    if complete:
        asked = last_iteration(root, order.run, order.config)
        say(nothing_done(status, asked, order.config.retrain is not None))
    return status, summarise(status, meter)


def nothing_done(status: RunStatus, asked: int, retrains: bool) -> str:
    """Explain that a complete run does nothing, and name the option that continues it."""
    more = "" if retrains else f"; --iterations {status.iterations + 1} or more continues it"
    if status.iterations > asked:
        done = f"run {status.run} already has {status.iterations}"
        return f"nothing to do: {count(asked, 'iteration')} asked for, and {done}{more}"
    return f"nothing to do: run {status.run} already has all {count(asked, 'iteration')}{more}"


def summarise(status: RunStatus, meter: MemoryMeter) -> RunResult:
    shared = set(RunResult.model_fields) & set(RunStatus.model_fields)
    return RunResult(
        **status.model_dump(include=shared),
        seconds_total=round(meter.seconds, 2),
        peak_pss_gib=round(meter.peak_gib, 3),
    )


def _run_flow(order: Order, root: Root, say: Say) -> None:
    """Run the flow. A Prefect server that is gone before it has the last state costs its page, not the run."""
    try:
        with prefect_server() as server, process_cluster() as cluster:
            cluster.start()  # while the server starts
            with connected(server):
                run(order.run, order.root, order.config, order.one_stage)
    except WorkerLost as lost:
        if not is_complete(root, order.run, order.config):
            raise
        say(f"{lost}. The run is complete; the page of its flow run is not")


def _release(run: str, root: str, say: Say) -> None:
    """Release processes of a completed run whose driver was killed at its end."""
    try:
        release_workers(run, root)
    except RatchetError as failure:
        say(f"warning: the processes of the run on the cluster, if there are any, stay there: {failure}")


def _quieten_prefect() -> None:
    """Keep Prefect's log off the terminal, where each error is shown once, in our words; its server has the full log.

    PREFECT_LOGGING_LEVEL set to INFO or DEBUG shows it."""
    if logging.getLogger("prefect").getEffectiveLevel() > logging.INFO:
        for handler in (*logging.getLogger().handlers, *logging.getLogger("prefect._internal").handlers):
            handler.addFilter(lambda record: not record.name.startswith(("prefect", "EventsWorker", "APILogWorker")))
