"""A run of the real stages, loop and state handling over small workers, driven by `flows.driving`.

`python -m tests.faults.small_run` reads paths of plans from its input, one per line, executes each in its own process
and writes the exit code. The processes are forked from this one, so a start costs no imports.
"""

import gc
import io
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 - pyarrow looks for it when it first makes an array of a list
import psutil
import pyarrow.compute
import pyarrow.pandas_compat  # noqa: F401 - otherwise each forked process imports these when it first reads a table
from pydantic import BaseModel, ConfigDict
from rich.console import Console

from flows.driving import Drive
from flows.proof.faults import FLOW, FaultFolder
from flows.views.history import IterationRecord
from flows.views.progress import Progress
from storage import kill_points, layout
from storage.backends.root import open_root
from storage.errors import RatchetError
from storage.kill_points import Point
from storage.ownership.lease import Lease
from storage.write_behind import WriteBehind
from tasks.config.code_version import code_version
from tasks.environments.hosting import host_processes
from tasks.rewards.resolve import find_reward
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tests.faults.journal import Journal
from tests.faults.processes import NODE, SmallFleet
from tests.small.config import PIECES, small_config

RUN = "small"
FILE_LIMIT = 24 << 10  # less than a file of a train state, more than anything else
_PATIENCE = 60


class Plan(BaseModel):
    """Orders for one process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: str
    """Root in which the run is stored."""
    folder: str
    """Folder of the journal, scratch files and the fault folder; used by this process only."""
    replaces: bool = False
    """Dead workers are noticed between stages, and replaced."""
    hold_state: int | None = None
    """Iteration whose train state is stored only once something waits for it."""
    full_disk: int | None = None
    """No large file can be written from the training of this iteration on."""
    other_lesson: int | None = None
    """Iteration whose training gives a different result; needs a run that was not interrupted before."""
    waits: dict[str, str] = {}
    """Points at which a thread waits until the process has reached another: `STAGE@ITERATION:POINT`, and `#2` after it
    for the second time."""
    settings: tuple[str, ...] = ()
    """Settings of the configuration, as `--set` takes them."""

    @property
    def faults(self) -> FaultFolder:
        """Fault folder: the process to kill, and the points that were reached."""
        return FaultFolder(Path(self.folder) / "faults")

    @property
    def journal(self) -> Path:
        return Path(self.folder) / "journal.jsonl"

    @property
    def messages(self) -> Path:
        """The process's standard error."""
        return Path(self.folder) / "messages"


class NotedOutbox(WriteBehind):
    """Notes each wait for all jobs."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def settle(self, name=None) -> None:
        if name is None:
            self._journal.note("settle", "outbox", 0)
        super().settle(name)


class Observer:
    """Carries out the plan at the points of the run."""

    def __init__(self, plan: Plan, fleet: SmallFleet, journal: Journal) -> None:
        self._plan, self._fleet, self._journal = plan, fleet, journal
        self._lock = threading.Lock()
        self._parts = self._settled = 0

    def __call__(self, point: Point, key: str) -> None:
        place = layout.place_of(key)
        if place is not None and point is Point.MID_PART:
            self._note(key, *place)
        if place is not None and (point is not Point.MID_PART or layout.is_part(key)):
            self._wait(f"{place[1]}@{place[0]}:{point}")
        if place == (self._plan.full_disk, Stage.TRAIN) and point is Point.STARTED:
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, resource.RLIM_INFINITY))
        if place == (self._plan.hold_state, Stage.TRAIN):
            if point is Point.STARTED:
                self._settled = self._journal.count("settle")
            elif layout.is_part(key):
                self._journal.wait_for("settle", self._settled + 1)
        with self._lock:  # files of a state are stored by several threads
            if point is not Point.MID_PART or place is None or not self._first_piece(key, place[1]):
                self._kill(point, key)

    def _note(self, key: str, iteration: int, stage: str) -> None:
        """Note the record by which a stage marks that its body begins, or that a piece is generated."""
        if ".attempt-" in key:
            self._journal.note("body", stage, iteration)
        elif ".pieces/" in key:
            self._journal.note("piece", Path(key).stem, iteration)

    def _wait(self, name: str) -> None:
        self._journal.note(name, "point", 0)
        times = self._journal.count(name)
        if other := self._plan.waits.get(name if times == 1 else f"{name}#{times}"):
            wanted, _, number = other.partition("#")
            self._journal.wait_for(wanted, int(number or 1))

    def _first_piece(self, key: str, stage: Stage) -> bool:
        """Kill a rollout in its second piece, when the first is recorded."""
        if stage != Stage.ROLLOUT or not layout.is_part(key):
            return ".increments/" in key
        self._parts += 1
        return self._parts % PIECES == 1

    def _kill(self, point: Point, key: str) -> None:
        faults, processes = self._plan.faults, dict[str, int]()
        before = faults.delivered()

        def found() -> dict[str, int]:  # only to kill one of them: it reads of every process of the machine
            processes.update({**self._fleet.processes(), **host_processes()})
            return processes

        faults.observe(point, key, found)
        for fault in faults.delivered()[len(before) :]:
            # the run continues with a dead process, not with a dying one
            for name in processes if fault.victim == NODE else (fault.victim,):
                wait_until_gone(processes[name])


def wait_until_gone(process: int) -> None:
    """Wait until a process has ended, whether or not its exit status was collected."""
    deadline = time.monotonic() + _PATIENCE
    while is_running(process):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {process} is still running")
        time.sleep(0.001)


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def drive(plan: Plan) -> None:
    """Complete the run."""
    journal, config = Journal(plan.journal), small_config(plan.settings)

    def started(name: str, process: int) -> None:
        journal.note("process", name, process)

    started(FLOW, os.getpid())
    root = open_root(plan.root)

    def called(method: str, arguments: Sequence[Any]) -> None:
        journal.note("called", method, 0)
        for seed in arguments[2] if method == "enqueue" else ():
            journal.note("sampled", "engine", int(seed))

    fleet = SmallFleet(config, plan.replaces, started, plan.other_lesson, called)

    @contextmanager
    def opener(lease: Lease, digest: str) -> Iterator[RunContext]:
        observer = Observer(plan, fleet, journal)
        with (
            kill_points.observed(observer),
            tempfile.TemporaryDirectory(dir=plan.folder) as scratch,
            tempfile.TemporaryDirectory(dir=plan.folder) as memory,
            NotedOutbox(journal) as outbox,
        ):
            yield RunContext(RUN, root, config, digest, fleet, Path(scratch), lease, outbox, memory=Path(memory))

    Drive(RUN, root, config, NotedProgress(journal, config.run.iterations), opener).complete()


class NotedProgress(Progress):
    """Notes that an iteration is published completely, and shows nothing."""

    def __init__(self, journal: Journal, iterations: int) -> None:
        super().__init__(RUN, iterations, Console(file=io.StringIO()))
        self._journal = journal

    def finished(self, record: IterationRecord) -> None:
        self._journal.note("concluded", "iteration", record.iteration)


def begin(plan: Plan) -> int:
    """Execute a plan in its own process; returns its exit code, negative for a signal."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 70
    try:
        signal.alarm(2 * _PATIENCE)  # no test waits for ever
        # a process that outlives the run must not keep our answer from being read completely
        for file, own in ((os.devnull, sys.stdin), (os.devnull, sys.stdout), (plan.messages, sys.stderr)):
            os.dup2(os.open(file, os.O_CREAT | os.O_RDWR, 0o644), own.fileno())
        drive(plan)
        code = 0
    except RatchetError as error:
        os.write(sys.stderr.fileno(), f"{type(error).__name__}: {error}\n".encode())
        code = error.exit_code
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise
    finally:
        os._exit(code)


if __name__ == "__main__":
    code_version()  # computed once for all
    find_reward("exact_match").load()  # the same: it looks through all installed packages
    gc.freeze()  # else each process would copy the imported modules when it first collects garbage
    for line in sys.stdin:
        sys.stdout.write(f"{begin(Plan.model_validate_json(Path(line.strip()).read_bytes()))}\n")
        sys.stdout.flush()
