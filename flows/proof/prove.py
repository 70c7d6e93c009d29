"""`ratchet prove-resume`: a run uninterrupted, and again with processes killed, must end in the same bits."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import computed_field

from flows.proof.compare import Comparison, Counts, Pair, lend_rollouts
from flows.proof.faults import Fault, FaultFolder, check, chosen
from flows.views.output import Output
from storage.backends.root import Root, open_root
from storage.errors import InputError, StageFailed
from storage.kill_points import Point
from storage.manifest import find
from storage.ownership.scratch import scratch
from storage.upkeep.catalog import names
from tasks.config.environment import Settings, with_faults
from tasks.config.run import RunConfig
from tasks.stages.names import Stage
from tasks.workers.placement import engines_repeat

RUN = "proof"  # id of the run, in both of its roots

_LINGER_S = 120.0  # Ray's agents take long to notice that their node was killed


@dataclass(frozen=True)
class ProofOrder:
    config: RunConfig
    path: str
    settings: tuple[str, ...]  # as given with --set; passed on to the processes that are started
    root: str  # root below which both runs are stored, each in a folder of its own
    kills: int  # number of kills at random points; ignored if points are given
    seed: int  # chooses the points, and the bit of `plant`
    at: tuple[Fault, ...] = ()
    regenerate: bool = False  # let the interrupted run sample for itself instead of giving it the stored rollouts
    plant: bool = False  # flip one bit, to see the proof fail


class ProofReport(Counts, frozen=True, extra="forbid"):
    whole: str  # root of the run that was not interrupted
    interrupted: str  # root of the run that was
    iterations: int  # RL iterations compared, after iteration 0
    rollouts: str
    """`stored`: both runs were trained on the same stored samples. `regenerated`: each sampled for itself."""
    kills_planned: int
    kills_delivered: int
    points: tuple[str, ...]  # points at which a process was killed, as STAGE@ITERATION:POINT:VICTIM
    points_missed: tuple[str, ...]  # points that were planned and never reached
    starts: int  # number of starts of the interrupted run
    done_twice: tuple[str, ...]  # stages that were begun again although they were committed
    orphans: tuple[str, ...]  # processes of the interrupted run that were still running after it
    planted: bool
    differences: tuple[str, ...]
    determinism: str  # end of determinism, in words

    @computed_field
    @property
    def identical(self) -> bool:
        """True if nothing differs and nothing was missed, done twice or left running."""
        return not (self.differences or self.points_missed or self.done_twice or self.orphans)

    @computed_field
    @property
    def first_difference(self) -> str | None:
        return self.differences[0] if self.differences else None


def prove(order: ProofOrder, output: Output) -> int:
    """Run, run again with kills, compare, and report; returns 0 if nothing differs, else 1. Raises InputError if a
    given point does not exist in this run, StageFailed if a run failed without being killed."""
    faults = order.at or chosen(order.config, order.kills, order.seed, order.regenerate)
    check(order.config, faults, order.regenerate)
    check_regenerate(order, Settings.from_environment())
    whole, interrupted = (open_root(f"{order.root.rstrip('/')}/{name}") for name in ("whole", "interrupted"))
    _check_empty(order.root, whole, interrupted)
    with scratch() as place:
        output.say(f"prove-resume: {order.config.run.iterations} iterations without interruption")
        undisturbed = FaultFolder(place / "none")
        undisturbed.plan([])
        _run_killed(order, whole, undisturbed, output)
        if not order.regenerate:
            lend_rollouts(whole, interrupted, RUN)
        folder = FaultFolder(place / "faults")
        folder.plan(list(faults))
        output.say(f"prove-resume: again, with {len(faults)} kills: {', '.join(map(str, faults))}")
        starts = _run_killed(order, interrupted, folder, output)
        output.say("prove-resume: comparing")
        return judge(order, whole, interrupted, folder, starts, output)


def judge(order: ProofOrder, whole: Root, interrupted: Root, folder: FaultFolder, starts: int, output: Output) -> int:
    """Compare two runs that have ended, and report; returns as `prove`. `folder` has the kills of the interrupted run,
    which was started `starts` times."""
    engines = engines_repeat(order.config, Settings.from_environment())
    comparison = Pair(whole, interrupted, RUN, engines).compare(
        order.config.run.iterations, order.config.evaluate.every, order.seed if order.plant else None
    )
    report = _report(order, whole, interrupted, folder, starts, comparison)
    output.result(report, report_lines(report))
    return 0 if report.identical else 1


def check_regenerate(order: ProofOrder, settings: Settings) -> None:
    """Raises InputError: the interrupted run is to sample for itself, and its engines would give other samples."""
    if order.regenerate and not engines_repeat(order.config, settings):
        raise InputError(
            f"--regenerate: on cards engines do not repeat their samples with device.deterministic = "
            f"{order.config.device.deterministic!r}: leave it out, or give --set device.deterministic=true"
        )


def _check_empty(url: str, *roots: Root) -> None:
    for root in roots:
        if names(root, RUN, 0).manifests:  # without any, a start has failed there, and left nothing to compare
            raise InputError(f"{url} already holds a proof: give another --root, or remove that one")


def start(
    order: ProofOrder, root: Root, folder: FaultFolder, program: Sequence[str] = ("flows",)
) -> subprocess.Popen[bytes]:
    """Start a process that drives the run in a root, with the faults of a folder; `program` is a module that takes the
    words of `ratchet`, and its first words."""
    asked = [f"--iterations={order.config.run.iterations}", *(f"--set={setting}" for setting in order.settings)]
    command = ["run", order.path, f"--root={root.url}", f"--run={RUN}", "--json", *asked]
    line, environment = [sys.executable, "-m", *program, *command], with_faults(folder.path)
    return subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL)


def _start(order: ProofOrder, root: Root, folder: FaultFolder) -> int:
    process = start(order, root, folder)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # a terminal interrupts both processes
        raise


def _run_killed(order: ProofOrder, root: Root, folder: FaultFolder, output: Output) -> int:
    starts, delivered = 0, 0
    while True:
        starts += 1
        code = _start(order, root, folder)
        before, delivered = delivered, len(folder.delivered())
        if code == 0:
            return starts
        if delivered == before:
            raise StageFailed(f"the run ended with exit code {code} and was not killed: see its own message above")
        output.say(f"prove-resume: killed at {folder.delivered()[-1]}; starting again")


def _report(
    order: ProofOrder, whole: Root, interrupted: Root, folder: FaultFolder, starts: int, found: Comparison
) -> ProofReport:
    planned, delivered = folder.planned(), folder.delivered()
    return ProofReport(
        whole=whole.url, interrupted=interrupted.url, iterations=order.config.run.iterations,
        rollouts="regenerated" if order.regenerate else "stored", planted=order.plant, starts=starts,
        kills_planned=len(planned), kills_delivered=len(delivered), points=tuple(map(str, delivered)),
        points_missed=tuple(str(fault) for fault in planned if fault not in delivered),
        done_twice=tuple(_done_twice(folder)), orphans=tuple(_orphans(folder.path)),
        **found.model_dump(include=set(Counts.model_fields)), differences=tuple(map(str, found.differences)),
        determinism=where_determinism_ends(order, interrupted, found),
    )  # fmt: skip


def where_determinism_ends(order: ProofOrder, interrupted: Root, found: Comparison) -> str:
    """State in one sentence how far the comparison shows the run to be deterministic."""
    if found.differences:
        first = found.differences[0]
        return f"at {first.stage} of iteration {first.iteration}; everything after it belongs to another run"
    if order.regenerate:
        return "nowhere in this run: the engine repeated its samples, and everything after them is the same"
    rollouts = [find(interrupted, RUN, number, Stage.ROLLOUT) for number in range(1, order.config.run.iterations + 1)]
    metrics = [manifest.metrics for manifest in rollouts if manifest is not None]
    again, equal = (sum(one.get(name) or 0 for one in metrics) for name in ("sampled_again", "sampled_again_equal"))
    repeated = f"of {again:.0f} stored samples that it was asked to repeat, {equal:.0f} are equal bit for bit"
    if not engines_repeat(order.config, Settings.from_environment()):
        repeated += "; probes of weight updates and evaluations, which it computes, were not compared"
    return f"none from stored rollouts to weights; the engine is outside the proof: {repeated}"


def _done_twice(folder: FaultFolder) -> Iterator[str]:
    committed: set[tuple[int, Stage]] = set()
    for reached in folder.reached():
        place = (reached.iteration, reached.stage)
        if reached.point is Point.COMMITTED:
            committed.add(place)
        elif reached.point is Point.STARTED and place in committed:
            yield f"{reached.stage} of iteration {reached.iteration}"


def _orphans(folder: Path) -> list[str]:
    """Processes started with this fault folder that still run after a time in which they may end."""
    deadline = time.monotonic() + _LINGER_S
    while (left := [one for one in psutil.process_iter() if _belongs(one, folder)]) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [f"{process.pid} {process.name()}" for process in left]


def _belongs(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.pid != os.getpid() and str(folder) in process.environ().values()
    except psutil.Error:
        return False


def report_lines(report: ProofReport) -> list[str]:
    kills = f"{report.kills_delivered} of {report.kills_planned} kills delivered, {report.starts} starts"
    tensors = (
        f"{report.weights} weight and {report.optimizer} optimizer tensors, {report.rng} values of random generators"
    )
    states = f"{report.states} train states ({tensors})"
    compared = f"compared {report.manifests} manifests, {states}, {report.rows} rows, {report.metrics} metrics"
    troubles = [
        *(f"never reached: {point}" for point in report.points_missed),
        *(f"done twice: {stage}" for stage in report.done_twice),
        *(f"still running: {process}" for process in report.orphans),
        *([f"first difference: {report.first_difference}"] if report.differences else []),
        *([f"{len(report.differences) - 1} more differences"] if len(report.differences) > 1 else []),
    ]
    verdict = "the interrupted run ended in the same bits" if report.identical else "NOT the same"
    return [kills, compared, *troubles, f"determinism ends: {report.determinism}", verdict]
