"""A run with small stage bodies over the real store, driven as `flows.run` and `flows.iteration` drive one.

`python -m tests.faults.small_run` reads paths of plans from its input, one a line, does each in a process of its own
and writes the exit code. The processes are forked from this one, so a start costs no imports.
"""

import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pyarrow.compute  # noqa: F401 - otherwise each forked process imports it when it first reads a table
from pydantic import BaseModel, ConfigDict

from flows.proof.faults import FLOW, FaultFolder
from flows.views.history import evaluation_due, first_incomplete
from storage import kill_points, layout, records
from storage.backends.root import open_root
from storage.errors import RatchetError
from storage.kill_points import Point
from storage.manifest import Manifest, need
from storage.ownership.lease import hold
from storage.write_behind import Outbox
from tasks.config.code_version import code_version
from tasks.stages.names import Stage
from tests.faults import small_stages as stages
from tests.faults.journal import Journal
from tests.faults.processes import NODE, Fleet
from tests.faults.small_stages import PIECES, RUN, SmallContext

ITERATIONS = 2
FILE_LIMIT = 24 << 10  # less than a file of a train state, more than anything else
_PATIENCE = 60


class Document(BaseModel):
    """Stands for the configuration of a run."""

    purpose: str = "faults"


class Plan(BaseModel):
    """What one process is to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: str
    """Where the run is stored."""
    folder: str
    """Where the journal, scratch files and the fault folder are; of this process alone."""
    replaces: bool = False
    """Whether dead workers are noticed between stages, and replaced."""
    hold_state: int | None = None
    """Iteration whose train state is stored only once somebody waits for it."""
    full_disk: int | None = None
    """From the training of this iteration on no large file can be written."""
    other_lesson: int | None = None
    """Iteration whose training comes out otherwise."""

    @property
    def faults(self) -> FaultFolder:
        """Whom to kill, and what was reached."""
        return FaultFolder(Path(self.folder) / "faults")

    @property
    def journal(self) -> Path:
        return Path(self.folder) / "journal.jsonl"

    @property
    def messages(self) -> Path:
        """What the process wrote to its standard error."""
        return Path(self.folder) / "messages"


class NotedOutbox(Outbox):
    """Notes that somebody waits."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def settle(self) -> None:
        self._journal.note("settle", "outbox", 0)
        super().settle()


class Observer:
    """Does at the points of the run what the plan says."""

    def __init__(self, plan: Plan, fleet: Fleet, journal: Journal) -> None:
        self._plan, self._fleet, self._journal = plan, fleet, journal
        self._lock = threading.Lock()
        self._parts = self._settled = 0

    def __call__(self, point: Point, key: str) -> None:
        place = layout.place_of(key)
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

    def _first_piece(self, key: str, stage: Stage) -> bool:
        """A rollout is killed in its second piece, when the first is recorded."""
        if stage != Stage.ROLLOUT or not layout.is_part(key):
            return False
        self._parts += 1
        return self._parts % PIECES == 1

    def _kill(self, point: Point, key: str) -> None:
        faults, processes = self._plan.faults, self._fleet.processes()
        before = faults.delivered()
        faults.observe(point, key, lambda: processes)
        for fault in faults.delivered()[len(before) :]:
            # the run goes on with a dead process, not with a dying one
            for name in processes if fault.victim == NODE else (fault.victim,):
                wait_until_gone(processes[name])


def wait_until_gone(process: int) -> None:
    """Wait until a process has ended, whether or not somebody asked for its exit status."""
    deadline = time.monotonic() + _PATIENCE
    while is_running(process):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {process} is still there")
        time.sleep(0.001)


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def drive(plan: Plan) -> None:
    """Do what is missing of the run."""
    journal = Journal(plan.journal)

    def started(name: str, process: int) -> None:
        journal.note("process", name, process)

    started(FLOW, os.getpid())
    root, fleet = open_root(plan.root), Fleet(plan.replaces, started)
    records.publish(root, layout.run_config_key(RUN), Document())
    with (
        kill_points.observed(Observer(plan, fleet, journal)),
        hold(root, RUN, "small run") as lease,
        tempfile.TemporaryDirectory(dir=plan.folder) as scratch,
        NotedOutbox(journal) as outbox,
    ):
        advance(SmallContext(root, fleet, Path(scratch), lease, outbox, journal, plan.other_lesson))


def advance(context: SmallContext) -> None:
    """As `flows.run.advance` and `flows.iteration`."""
    first = first_incomplete(context.root, RUN, ITERATIONS, 1)
    if first == 0:
        prepared = stages.prepare(context)
        trained = stages.warm_up(context, prepared)
        synced = conclude(context, 0, prepared, trained)
    else:
        prepared = need(context.root, RUN, 0, Stage.PREPARE)
        trained, synced = (need(context.root, RUN, first - 1, stage) for stage in (Stage.TRAIN, Stage.WEIGHT_SYNC))
    for iteration in range(max(first, 1), ITERATIONS + 1):
        rollouts = stages.rollout(context, iteration, prepared, synced)
        rewards = stages.reward(context, iteration, prepared, rollouts)
        trained = stages.train(context, iteration, prepared, rollouts, rewards, trained)
        synced = conclude(context, iteration, prepared, trained)
    context.outbox.settle()


def conclude(context: SmallContext, iteration: int, prepared: Manifest, trained: Manifest) -> Manifest:
    """The end of every iteration."""
    synced = stages.weight_sync(context, iteration, prepared, trained)
    if evaluation_due(iteration, ITERATIONS, 1):
        stages.evaluate(context, iteration, prepared, synced)
    context.outbox.add(lambda: context.journal.note("concluded", "iteration", iteration))
    return synced


def begin(plan: Plan) -> int:
    """Do a plan in a process of its own; returns its exit code, negative for a signal."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 70
    try:
        signal.alarm(2 * _PATIENCE)  # nobody waits for ever
        # a process that outlives the run must not keep our answer from being read to its end
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
    code_version()  # read once for all
    for line in sys.stdin:
        sys.stdout.write(f"{begin(Plan.model_validate_json(Path(line.strip()).read_bytes()))}\n")
        sys.stdout.flush()
