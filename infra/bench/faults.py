"""Effective training time with failures, and the seconds from a kill to the next gradient or token."""

import copy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from pydantic import BaseModel

from flows.proof.compare import Pair
from infra.bench.cases import CASES, SIDES, CaseName, KillName, SideName
from infra.bench.faults_marks import PLAN, Mark, Plan, noted
from infra.bench.loop import CONFIG, ROOT, RUN, default_tables, read_stages
from storage.backends.root import open_root
from storage.errors import InputError, StageFailed
from tasks.config.document import completed
from tasks.config.environment import Settings, child_python_path
from tasks.config.run import RunConfig
from tasks.stages.names import Stage
from trainer_core.config import Device

STEPS: dict[KillName, dict[str, str]] = {
    "rank": {
        "noticed": "the driver, or the command that starts the run again, knows",
        "asked": "pause before the next attempt; of a whole restart also Ray, engine and driver",
        "process": "processes",
        "imported": "imports",
        "met": "process groups",
        "built": "model",
        "loaded": "state",
        "gradient": "first gradient",
    },
    "engine": {
        "noticed": "the driver, or the command that starts the run again, knows",
        "asked": "pause before the next attempt; of a whole restart also Ray, ranks and driver",
        "process": "process",
        "imported": "imports",
        "built": "engine with the model as the run began",
        "loaded": "weights of the iteration",
        "token": "first token",
    },
}
"""Work that ends with each mark; the last one is what a kill is followed by in the end."""
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
    """Processes that were killed."""
    seconds: float
    """From the first rollout to the last weight sync."""
    effective: float
    """Seconds of the undisturbed run by these."""
    kill_to_gradient_s: float | None
    """Median over kills of a rank."""
    kill_to_token_s: float | None
    """Median over kills of an engine."""
    steps: dict[str, float]
    """The same by what was done, each until the last rank had done it."""
    differences: int | None
    """Values in manifests, tables and states that are not those of the undisturbed run. An edit of the bench meanwhile
    counts, because the reward's source is recorded."""
    first_difference: str | None
    """The first of these, in the order of work."""
    stored: int | None
    """Tokens of open responses that were stored when their engine was killed, over all kills."""
    sampled_again: int | None
    """Those of them that the next engine was not told to go on from."""


class FaultsBench(BaseModel):
    """Measurements."""

    device: str
    ranks: int
    iterations: int
    every: int
    """Iterations divisible by this number have a kill."""
    kill: KillName
    """The last rank, at its first gradient; or the engine, three steps after an increment of its responses was
    stored."""
    iteration_s: float
    """Mean of the undisturbed run."""
    sides: dict[SideName, Side]
    """`everything`: the command ends with the process, and is started again. `apart`: it is replaced by Ratchet, and
    the others keep their processes, ranks on CPU. `standby`: likewise, by a process that has its imports; on cards,
    where all ranks end with one, by as many as there are ranks."""


class Faults(BaseModel):
    """Order of a measurement."""

    iterations: int
    every: int
    seconds: float
    """Seconds that the reward of an iteration waits, so that iterations have the length asked; or, in equal parts
    before each step, the engine whose responses are longest."""
    kill: KillName = "rank"
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
    sides: list[SideName] = [one for one in SIDES if one == "undisturbed" or one in order.measured]
    found = dict[SideName, Side]()
    with tempfile.TemporaryDirectory(prefix="ratchet-faults-") as place:
        for name in sides:
            folder = Path(place, name)
            folder.mkdir()
            found[name] = _measured(name, order, overrides, folder, found.get("undisturbed"))
            told(f"{name}: {found[name].model_dump_json()}")
    seconds = found["undisturbed"].seconds / order.iterations
    device = Settings.from_environment().device("auto")
    return FaultsBench(device=device, iteration_s=seconds, sides=found,
                       **order.model_dump(exclude={"case", "seconds", "measured"}))  # fmt: skip


def check_engine(order: Faults, config: RunConfig) -> None:
    """Refuse what leaves no engine to kill in the middle of a rollout, or nothing to measure. Raises InputError."""
    increment, most = config.rollout.increments.tokens, config.rollout.max_tokens
    if order.every == 1:
        raise InputError("--every 1 --kill engine: the time that is measured begins with the first rollout, which must "
                         "have no failure; give 2 or more")  # fmt: skip
    if config.engine.count > 1:
        raise InputError(f"engine.count = {config.engine.count}: the others take over the samples of an engine that is "
                         "killed, and no first token follows; set it to 1")  # fmt: skip
    if config.engine.function is not None:
        raise InputError(
            f"engine.function = {config.engine.function!r}: the engine that is killed is vLLM's; leave it out"
        )
    if increment >= most:
        raise InputError(f"rollout.increments.tokens = {increment}: no increment of responses of {most} tokens "
                         "(rollout.max_tokens) is stored before they end; make it smaller")  # fmt: skip


def _measured(name: SideName, order: Faults, overrides: Sequence[str], folder: Path, whole: Side | None) -> Side:
    settings = settings_of(name, order, Settings.from_environment().device("auto"), overrides)
    config = completed(copy.deepcopy(default_tables(order.case)), settings, None, "the bench")
    if order.kill == "engine":
        check_engine(order, config)
    (folder / CONFIG).write_text(config.model_dump_json())
    plan = plan_of(order, config) if whole is not None else plan_of(order, config).model_copy(update={"at": ()})
    (folder / PLAN).write_text(plan.model_dump_json())
    starts = _driven(name, folder)
    stages, marks = read_stages(folder, order.iterations), noted(folder)
    begin = next(one.begin for one in stages if one.stage == Stage.ROLLOUT)
    seconds = max(one.end for one in stages if one.stage == Stage.WEIGHT_SYNC) - begin
    recoveries = recoveries_of(marks, plan)
    differing = [] if whole is None else _differences(folder, order.iterations)
    steps = {step: median(one[step] for one in recoveries) for step in STEPS[plan.kill]} if recoveries else {}
    to_next = median(sum(one.values()) for one in recoveries) if recoveries else None
    of_engine = recoveries and plan.kill == "engine"
    return Side(
        starts=starts,
        kills=len(recoveries),
        seconds=seconds,
        effective=1.0 if whole is None else whole.seconds / seconds,
        kill_to_gradient_s=None if of_engine else to_next,
        kill_to_token_s=to_next if of_engine else None,
        steps=steps,
        differences=None if whole is None else len(differing),
        first_difference=differing[0] if differing else None,
        stored=sum(mark.stored for mark in marks) if of_engine else None,
        sampled_again=sum(mark.again for mark in marks) if of_engine else None,
    )


def plan_of(order: Faults, config: RunConfig) -> Plan:
    """Plan of a run with failures."""
    killed, policy = range(order.every, order.iterations + 1, order.every), config.train.policy
    if order.kill == "engine":
        return Plan(kill="engine", at=tuple(killed), pause_s=order.seconds / config.rollout.max_tokens)
    updates = (((iteration - 1) * policy.epochs * policy.mini_batches) for iteration in killed)
    return Plan(kill="rank", at=tuple(updates))


def settings_of(name: SideName, order: Faults, device: Device, overrides: Sequence[str]) -> list[str]:
    """Changes to the configuration of a run; `overrides` come last."""
    of_engine = order.kill == "engine"
    replaced = order.ranks if device == "cuda" and not of_engine else 1
    increment = max(1, CASES[order.case].response // 8)
    return [
        *(f"run.iterations={order.iterations}", f"train.parallel.pipeline={order.ranks}"),
        *('reward.function="infra.bench.faults_rank:waited"', "reward.batch=true"),
        *(f"reward.arguments.seconds={0 if of_engine else order.seconds}", *_SIDES[name]),
        # all responses of an iteration are sampled together, and stored several times before they end
        *((f"rollout.increments.tokens={increment}", "rollout.groups_per_part=4096") if of_engine else ()),
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


def recoveries_of(marks: Sequence[Mark], plan: Plan) -> list[dict[str, float]]:
    """`steps_of` of each kill. Raises StageFailed: there were other kills than planned."""
    killed = [mark.at for mark in marks if mark.what == "killed"]
    if len(killed) != len(plan.at):
        raise StageFailed(
            f"{len(killed)} of {len(plan.at)} kills were made: the responses of a rollout ended before one of their "
            "increments was stored. Lengthen rollouts: raise --seconds"
        )
    return [steps_of(marks, at, plan.kill) for at in killed]


def steps_of(marks: Sequence[Mark], killed: float, kill: KillName = "rank") -> dict[str, float]:
    """Seconds of each step from a kill to the next gradient, or token: each ends when the last rank has done it."""
    after, last = [mark for mark in marks if mark.at > killed], list(STEPS[kill])[-1]
    noticed = next(mark.at for mark in after if mark.what == "noticed")  # others may have begun the same update
    first = min(mark.at for mark in after if mark.what == last and mark.at > noticed)
    steps, clock = dict[str, float](), killed
    for step in STEPS[kill]:
        ends = [mark.at for mark in after if mark.what == step and mark.at <= first]
        end = max(clock, *ends) if ends else clock
        steps[step], clock = end - clock, end
    return steps


def _differences(folder: Path, iterations: int) -> list[str]:
    ours, whole = (open_root(str(place / ROOT)) for place in (folder, folder.parent / "undisturbed"))
    return [str(one) for one in Pair(whole, ours, RUN).compare(iterations, 0).differences]
