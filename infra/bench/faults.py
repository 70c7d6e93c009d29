"""Effective training time with failures, and the seconds from the kill of a trainer rank to the next gradient."""

import copy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from pydantic import BaseModel

from flows.proof.compare import Pair
from infra.bench.cases import SIDES, CaseName, SideName
from infra.bench.faults_rank import PLAN, Mark, noted
from infra.bench.loop import CONFIG, ROOT, RUN, default_tables, read_stages
from storage.backends.root import open_root
from storage.errors import InputError, StageFailed
from tasks.config.document import completed
from tasks.config.environment import Settings, child_python_path
from tasks.stages.names import Stage
from trainer_core.config import Device

STEPS = {
    "noticed": "the driver, or the command that starts the run again, knows",
    "asked": "pause before the next attempt; of a whole restart also Ray, engine and driver",
    "process": "processes",
    "imported": "imports",
    "met": "process groups",
    "built": "model",
    "loaded": "state",
    "gradient": "first gradient",
}
"""Work that ends with each mark."""
_SIDES: dict[SideName, tuple[str, ...]] = {
    "undisturbed": (),
    "everything": ("run.retries=0",),
    "apart": ("run.retries=1000",),
    "standby": ("run.retries=1000",),
}


class Side(BaseModel):
    """One run."""

    starts: int
    """Times that its command was started."""
    kills: int
    """Ranks that were killed."""
    seconds: float
    """From the first rollout to the last weight sync."""
    effective: float
    """Seconds of the undisturbed run by these."""
    kill_to_gradient_s: float | None
    """Median over kills."""
    steps: dict[str, float]
    """The same by what was done, each until the last rank had done it."""
    differences: int | None
    """Values in manifests, tables and states that are not those of the undisturbed run. An edit of the bench meanwhile
    counts, because the reward's source is recorded."""
    first_difference: str | None
    """The first of these, in the order of work."""


class FaultsBench(BaseModel):
    """Measurements."""

    device: str
    ranks: int
    iterations: int
    every: int
    """A rank is killed in each iteration divisible by this number, at its first gradient."""
    iteration_s: float
    """Mean of the undisturbed run."""
    sides: dict[SideName, Side]
    """`everything`: the command ends with the rank, and is started again. `apart`: the rank is replaced by Ratchet, and
    the others keep their processes, on CPU. `standby`: likewise, by a process that has its imports; on cards, where all
    ranks end with one, by as many as there are ranks."""


class Faults(BaseModel):
    """Order of a measurement."""

    iterations: int
    every: int
    seconds: float
    """Seconds that the reward of an iteration waits, so that iterations have the length asked."""
    ranks: int = 2
    case: CaseName = "tiny"
    measured: tuple[SideName, ...] = SIDES
    """Sides to run; `undisturbed` always is, because the others are compared with it."""


def bench_faults(order: Faults, overrides: Sequence[str], told: Callable[[str], object]) -> FaultsBench:
    """Run the same iterations undisturbed and with kills.

    Raises:
        InputError: no iteration would have a failure, or the configuration cannot be used.
        StageFailed: a run ended by itself; its own message says why.
    """
    if order.every > order.iterations:
        raise InputError(f"--every {order.every}: none of {order.iterations} iterations would have a failure")
    found = dict[SideName, Side]()
    with tempfile.TemporaryDirectory(prefix="ratchet-faults-") as place:
        for name in SIDES:
            if name != "undisturbed" and name not in order.measured:
                continue
            folder = Path(place, name)
            folder.mkdir()
            found[name] = _measured(name, order, overrides, folder, found.get("undisturbed"))
            told(f"{name}: {found[name].model_dump_json()}")
    seconds = found["undisturbed"].seconds / order.iterations
    device = Settings.from_environment().device("auto")
    return FaultsBench(device=device, iteration_s=seconds, sides=found,
                       **order.model_dump(exclude={"case", "seconds", "measured"}))  # fmt: skip


def _measured(name: SideName, order: Faults, overrides: Sequence[str], folder: Path, whole: Side | None) -> Side:
    settings = settings_of(name, order, Settings.from_environment().device("auto"), overrides)
    config = completed(copy.deepcopy(default_tables(order.case)), settings, None, "the bench")
    (folder / CONFIG).write_text(config.model_dump_json())
    policy = config.train.policy
    killed = range(order.every, order.iterations + 1, order.every) if whole is not None else ()
    updates = [str((iteration - 1) * policy.epochs * policy.mini_batches) for iteration in killed]
    (folder / PLAN).write_text(" ".join(updates))
    starts = _driven(name, folder)
    stages, marks = read_stages(folder, order.iterations), noted(folder)
    begin = next(one.begin for one in stages if one.stage == Stage.ROLLOUT)
    seconds = max(one.end for one in stages if one.stage == Stage.WEIGHT_SYNC) - begin
    differing = [] if whole is None else _differences(folder, order.iterations)
    recoveries = [steps_of(marks, kill.at) for kill in marks if kill.what == "killed"]
    steps = {step: median(one[step] for one in recoveries) for step in STEPS} if recoveries else {}
    return Side(
        starts=starts,
        kills=len(recoveries),
        seconds=seconds,
        effective=1.0 if whole is None else whole.seconds / seconds,
        kill_to_gradient_s=median(sum(one.values()) for one in recoveries) if recoveries else None,
        steps=steps,
        differences=None if whole is None else len(differing),
        first_difference=differing[0] if differing else None,
    )


def settings_of(name: SideName, order: Faults, device: Device, overrides: Sequence[str]) -> list[str]:
    """Changes to the configuration of a run; `overrides` come last."""
    replaced = order.ranks if device == "cuda" else 1
    return [
        *(f"run.iterations={order.iterations}", f"train.parallel.pipeline={order.ranks}"),
        *('reward.function="infra.bench.faults_rank:waited"', "reward.batch=true"),
        *(f"reward.arguments.seconds={order.seconds}", *_SIDES[name]),
        *((f"workers.standby={replaced}",) if name == "standby" else ()),
        *overrides,
    ]


def _driven(name: SideName, folder: Path) -> int:
    """Start the run until it is done; returns the number of starts."""
    command = [sys.executable, "-P", "-m", "infra.bench.faults_run", str(folder)]
    starts, kills = 0, 0
    while True:
        starts += 1
        code = subprocess.run(command, env=child_python_path(), stdout=subprocess.DEVNULL, check=False).returncode
        if code == 0:
            return starts
        before, kills = kills, sum(mark.what == "killed" for mark in noted(folder))
        if before == kills:
            raise StageFailed(f"the run {name} ended with exit code {code}, not by a kill: see its own message above")


def steps_of(marks: Sequence[Mark], killed: float) -> dict[str, float]:
    """Seconds of each step from a kill to the next gradient: each ends when the last rank has done it."""
    after = [mark for mark in marks if mark.at > killed]
    noticed = next(mark.at for mark in after if mark.what == "noticed")  # others may have begun the same update
    first = min(mark.at for mark in after if mark.what == "gradient" and mark.at > noticed)
    steps, clock = dict[str, float](), killed
    for step in STEPS:
        ends = [mark.at for mark in after if mark.what == step and mark.at <= first]
        end = max(clock, *ends) if ends else clock
        steps[step], clock = end - clock, end
    return steps


def _differences(folder: Path, iterations: int) -> list[str]:
    ours, whole = (open_root(str(place / ROOT)) for place in (folder, folder.parent / "undisturbed"))
    return [str(one) for one in Pair(whole, ours, RUN).compare(iterations, 0).differences]
