"""Points at which processes of a run can be killed, for `ratchet prove-resume`."""

import random
from collections.abc import Iterator, Sequence

from flows.proof.faults import FLOW, NODE, Fault
from flows.views.history import evaluation_due, wanted_stages
from storage.errors import InputError
from storage.kill_points import Point
from tasks.config.run import RunConfig
from tasks.stages.names import Stage

_ENVIRONMENT = "environment"
_PLAYING = (Point.MID_RESPONSE, Point.MID_PART)  # of a rollout: the host of its environments is there


def chosen(config: RunConfig, kills: int, seed: int, regenerate: bool) -> tuple[Fault, ...]:
    """Random points of a run, at most one per stage and iteration, in the order of work. With `regenerate` the run
    samples for itself, and so reaches the middle of a rollout's part. Raises InputError if there are fewer stages than
    kills."""
    cells: dict[tuple[int, Stage], list[Fault]] = {}
    for fault in possible(config, regenerate):
        if fault.point is Point.MID_RESPONSE:  # a run with short responses never reaches it
            continue
        cells.setdefault((fault.iteration, fault.stage), []).append(fault)
    if kills > len(cells):
        raise InputError(f"--kills {kills}: this run has {len(cells)} stages; raise --iterations or lower --kills")
    draw = random.Random(seed)
    places = sorted(draw.sample(range(len(cells)), kills))
    stages = list(cells.values())
    return tuple(draw.choice(stages[place]) for place in places)


def possible(config: RunConfig, regenerate: bool) -> Iterator[Fault]:
    """Every point at which the process to be killed is sure to exist, in the order of work."""
    for iteration in range(config.run.iterations + 1):
        for stage in wanted_stages(config, iteration):
            if stage == Stage.EVALUATE and not evaluation_due(iteration, config.run.iterations, config.evaluate.every):
                continue
            for point in _points(stage, stored=not regenerate):
                for victim in _victims(config, stage, point):
                    yield Fault(stage, iteration, point, victim)


def _points(stage: Stage, stored: bool) -> list[Point]:
    absent = {
        Point.MID_PART: stage == Stage.WEIGHT_SYNC or (stage == Stage.ROLLOUT and stored),
        Point.MID_RESPONSE: stage != Stage.ROLLOUT or stored,
        Point.UPLOAD: stage not in (Stage.TRAIN, Stage.PREPARE),
        Point.SENT: stage != Stage.WEIGHT_SYNC,
        Point.SERVED: stage != Stage.WEIGHT_SYNC,
    }
    return [point for point in Point if not absent.get(point, False)]


def _victims(config: RunConfig, stage: Stage, point: Point) -> list[str]:
    if stage in (Stage.PREPARE, Stage.REWARD) or point is Point.STARTED:
        return [FLOW, NODE]  # after a restart the workers may not exist yet
    workers = _workers(config)
    if stage is Stage.TRAIN:  # engines start beside it, or with `train.memory` behind it
        late = ("engine-", "core-", "worker-") if config.train.memory.in_use else ("core-", "worker-")
        workers = [one for one in workers if not one.startswith(late)]
    if stage is not Stage.ROLLOUT or point not in _PLAYING:
        workers = [one for one in workers if not one.startswith(_ENVIRONMENT)]
    return [FLOW, NODE, *workers]


def _workers(config: RunConfig) -> list[str]:
    ranks = [f"trainer-{rank}" for rank in range(config.train.parallel.world_size)]
    engine = config.engine
    several = engine.tensor > 1
    cores = engine.count if several or engine.own_process else 0  # by default it depends on the machine
    workers = engine.count * engine.tensor if several else 0
    hosts = int(config.environment is not None)
    counts = {"engine": engine.count, "core": cores, "worker": workers, _ENVIRONMENT: hosts}
    return [*ranks, *(f"{kind}-{number}" for kind, count in counts.items() for number in range(count))]


def check(config: RunConfig, faults: Sequence[Fault], regenerate: bool) -> None:
    """Refuse points and victims that the run does not have. Raises InputError, which names the first of them."""
    there = {(fault.stage, fault.iteration, fault.point) for fault in possible(config, regenerate)}
    victims = (FLOW, NODE, *_workers(config))
    for fault in faults:
        if (fault.stage, fault.iteration, fault.point) not in there:
            why = " (with stored rollouts nothing is sampled: --regenerate)" if fault.stage == Stage.ROLLOUT else ""
            fact = f"this run of {config.run.iterations} iterations never reaches that point"
            raise InputError(f"--at {fault}: {fact}{why}")
        if fault.victim not in victims:
            raise InputError(f"--at {fault}: this run has no process {fault.victim!r}, only {', '.join(victims)}")
