"""The fault matrix on real processes with small stage bodies: each process is killed at each point of each stage.

A cell is one run: killed once by SIGKILL, then started again, then compared with the uninterrupted run. Cells
are named victim-stage-point.
"""

import itertools
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from flows.proof.faults import FLOW, Fault
from storage import layout, records
from storage.kill_points import Point
from storage.manifest import Manifest
from storage.parts import read_table
from storage.schema import ROLLOUT
from storage.unfinished import IncrementRecord
from storage.upkeep.verify import Problem, verify
from tasks.stages.names import Stage
from tests.faults.processes import NODE, WORKERS
from tests.faults.running import Attempt, Look, SmallRun
from tests.faults.small_run import RUN
from tests.small.config import ITERATIONS, PIECES, PROMPTS, SAMPLES

STAGES = {
    "prepare": (Stage.PREPARE, 0),
    "warm-up": (Stage.TRAIN, 0),
    "rollout": (Stage.ROLLOUT, 1),
    "reward": (Stage.REWARD, 1),
    "train": (Stage.TRAIN, 1),
    "weight-sync": (Stage.WEIGHT_SYNC, 1),
    "evaluate": (Stage.EVALUATE, 1),
}
TABLE = (Point.STARTED, Point.MID_PART, Point.PARTS_DONE, Point.COMMITTED)
FILES = (Point.STARTED, Point.MID_PART, Point.UPLOAD, Point.PARTS_DONE, Point.COMMITTED)
POINTS = {
    Stage.PREPARE: FILES,
    Stage.TRAIN: FILES,
    Stage.ROLLOUT: (Point.STARTED, Point.MID_RESPONSE, *TABLE[1:]),
    Stage.REWARD: TABLE,
    Stage.WEIGHT_SYNC: (Point.STARTED, Point.SENT, Point.SERVED, Point.PARTS_DONE, Point.COMMITTED),
    Stage.EVALUATE: TABLE,
}
VICTIMS = (FLOW, *WORKERS, NODE)


@dataclass(frozen=True)
class Cell:
    """One kill, and the way in which its victim's death is noticed."""

    fault: Fault
    replaced: bool = False
    """Noticed between two stages by the process that drives the run: it starts a new worker and continues."""
    retried: bool = False
    """Noticed in the middle of a stage: the same process tries the stage again."""


def cell(victim: str, stage: str, point: Point, *, replaced: bool = False, retried: bool = False) -> tuple[str, Cell]:
    name = f"{victim}-{stage}-{point}" + ("-replaced" if replaced else "") + ("-retried" if retried else "")
    return name, Cell(Fault(*STAGES[stage], point, victim), replaced, retried)


KILLS = dict(
    cell(victim, stage, point) for victim in VICTIMS for stage, (kind, _) in STAGES.items() for point in POINTS[kind]
)
REPLACED = dict(
    cell(victim, stage, Point.STARTED, replaced=True)
    for victim in WORKERS
    for stage in ("rollout", "train", "weight-sync", "evaluate")
)
RETRIED = dict(
    [
        cell("engine-0", "rollout", Point.MID_PART, retried=True),
        cell("engine-0", "rollout", Point.MID_RESPONSE, retried=True),
        cell("engine-0", "weight-sync", Point.SENT, retried=True),
        cell("engine-0", "weight-sync", Point.SERVED, retried=True),
        cell("trainer-0", "weight-sync", Point.SERVED, retried=True),
        cell("engine-0", "weight-sync", Point.PARTS_DONE, retried=True),
        cell("trainer-0", "train", Point.UPLOAD, retried=True),
        cell("trainer-1", "weight-sync", Point.PARTS_DONE, retried=True),
    ]
)
CELLS = KILLS | REPLACED | RETRIED
QUICK = {
    "flow-warm-up-committed",
    "flow-rollout-mid-part",
    "flow-rollout-mid-response",
    "flow-train-upload",
    "trainer-1-weight-sync-sent",
    "engine-0-weight-sync-served",
    "engine-0-rollout-started-replaced",
    "engine-0-rollout-mid-part-retried",
    "engine-0-rollout-mid-response-retried",
    "trainer-0-train-upload-retried",
}


def traits(wanted: Cell) -> set[tuple[object, object]]:
    """Every two of: the victim, the stage, the point, and the way in which the death is noticed."""
    fault = wanted.fault
    noticed = "replaced" if wanted.replaced else "retried" if wanted.retried else "restarted"
    return set(itertools.combinations((fault.victim, (fault.stage, fault.iteration), fault.point, noticed), 2))


def pairwise(begin: set[str]) -> set[str]:
    """Choose cells in which every two traits meet that meet in some cell: those given, and few others."""
    chosen, missing = set(begin), set().union(*map(traits, CELLS.values()))
    missing -= set().union(*(traits(CELLS[name]) for name in begin))
    while missing:
        best = max(CELLS, key=lambda name: len(traits(CELLS[name]) & missing))
        chosen.add(best)
        missing -= traits(CELLS[best])
    return chosen


DAILY = pairwise(QUICK)
"""Cells that CI runs; `make prove` runs every cell."""


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if name in QUICK else (pytest.mark.slow,) if name in DAILY else (pytest.mark.full,)


PARAMETERS = [pytest.param(name, id=name, marks=marks(name)) for name in CELLS]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell."""

    killed: Attempt
    between: Look
    again: Attempt
    end: Look


@pytest.fixture(scope="session")
def outcomes(request, launcher, tmp_path_factory):
    """The requested cells, run beside the tests, which wait for theirs."""
    folder = tmp_path_factory.mktemp("cells")
    asked = {item.name for item in request.session.items}
    pool = ThreadPoolExecutor(1)  # each thread has a server, which imports for seconds
    yield {
        name: pool.submit(play, SmallRun(launcher, folder / name), wanted)
        for name, wanted in CELLS.items()
        if f"test_a_kill_changes_nothing_in_the_end[{name}]" in asked
    }
    pool.shutdown(cancel_futures=True)


def play(run: SmallRun, wanted: Cell) -> Outcome:
    settings = ("run.retries=1",) if wanted.retried else ()
    killed = run.attempt(wanted.fault, replaces=wanted.replaced or wanted.retried, settings=settings)
    between = run.look()
    again = run.attempt()
    return Outcome(killed, between, again, run.look())


def test_the_matrix_has_every_point_that_a_run_comes_by(whole):
    attempt, _ = whole
    reached = {(one.stage, one.iteration, one.point) for one in attempt.reached}
    places = [(Stage.PREPARE, 0), (Stage.TRAIN, 0), (Stage.WEIGHT_SYNC, 0), (Stage.EVALUATE, 0)]
    rl = (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE)
    places += [(stage, iteration) for iteration in range(1, ITERATIONS + 1) for stage in rl]
    assert reached == {(stage, iteration, point) for stage, iteration in places for point in POINTS[stage]}
    assert len(KILLS) == len(VICTIMS) * sum(len(POINTS[stage]) for stage, _ in STAGES.values())


def test_every_process_is_killed_in_every_stage_and_at_every_point_each_day():
    assert QUICK <= DAILY
    assert len(DAILY) < len(CELLS) / 3
    daily = [CELLS[name] for name in DAILY]
    for kills in (daily, CELLS.values()):
        assert {(one.fault.victim, one.fault.stage) for one in kills} == set(itertools.product(VICTIMS, POINTS))
        assert {(one.fault.stage, one.fault.point) for one in kills} == {
            (stage, point) for stage, points in POINTS.items() for point in points
        }
    assert {(one.fault.victim, one.fault.point) for one in daily} == set(itertools.product(VICTIMS, Point))


def test_a_run_that_nobody_interrupts_does_everything_once(whole):
    attempt, look = whole
    assert attempt.bodies == Counter(look.digests.keys())
    assert set(attempt.pieces) == look.pieces
    assert len(attempt.pieces) == len(look.pieces) == ITERATIONS * PIECES
    assert attempt.lingering == []
    assert verify(look.root, RUN).findings == ()


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_kill_changes_nothing_in_the_end(name, outcomes, whole):
    wanted, outcome = CELLS[name], outcomes[name].result()
    check_the_kill(wanted, outcome)
    check_nothing_is_done_twice(wanted, outcome)
    check_rows(outcome.end)
    check_storage(outcome)
    _, expected = whole
    assert outcome.end.digests == expected.digests
    assert outcome.end.parts == expected.parts
    shutil.rmtree(outcome.end.root.folder.parent)


def check_the_kill(wanted: Cell, outcome: Outcome) -> None:
    """Check that the kill was delivered and noticed as it should be, and that no process of the killed run is left."""
    killed, again = outcome.killed, outcome.again
    assert killed.delivered == [wanted.fault], killed.messages
    assert killed.lingering == []
    if wanted.fault.victim == FLOW:
        assert killed.code == -9
        check_what_is_left(wanted.fault, outcome)
    elif wanted.replaced or wanted.retried:
        started = Counter(entry.name for entry in killed.journal if entry.what == "process")
        assert killed.code == 0, killed.messages
        assert started[wanted.fault.victim] == 2
        assert outcome.again.bodies == Counter()
        check_what_lives_is_kept(wanted, started)
    else:
        assert killed.code == 1
        assert "WorkerLost" in killed.messages
    assert (again.code, again.lingering) == (0, []), again.messages


def check_what_lives_is_kept(wanted: Cell, started: Counter[str]) -> None:
    """Check that a dead rank ends the other ranks, which work in step, and no engine; a dead engine ends no rank."""
    ranks = wanted.fault.victim.startswith("trainer")
    assert {name for name in WORKERS if started[name] == 2} == {
        name for name in WORKERS if name.startswith("trainer") == ranks
    }


def check_what_is_left(fault: Fault, outcome: Outcome) -> None:
    """Check that the driving process died where it should: the records that it left match the point's name."""
    place = (fault.iteration, fault.stage)
    parts = outcome.between.there(outcome.end.manifests[place].parts)
    assert (place in outcome.between.manifests) == (fault.point is Point.COMMITTED)
    if fault.stage == Stage.ROLLOUT:
        recorded = {Point.STARTED: 0, Point.MID_RESPONSE: 0, Point.MID_PART: 1}.get(fault.point, PIECES)
        assert len(outcome.between.pieces) == recorded
    match fault.point:
        case Point.STARTED | Point.MID_RESPONSE | Point.SENT | Point.SERVED:
            assert not any(parts)
        case Point.MID_PART:
            folder = f"{layout.part_folder(RUN)}/{fault.iteration:06d}/{fault.stage.value}/"
            assert [key for key in outcome.between.keys if key.startswith(folder) and layout.is_temporary(key)]
            assert not all(parts)
        case Point.UPLOAD:
            assert any(parts)
            assert not all(parts)
        case Point.PARTS_DONE | Point.COMMITTED:
            assert all(parts)


def attempts(look: Look, place: tuple[int, str]) -> int:
    """Count the recorded attempts at a stage."""
    iteration, name = place
    return sum(f"/{iteration:06d}/{name}.r0.attempt-" in key for key in look.keys)


def check_nothing_is_done_twice(wanted: Cell, outcome: Outcome) -> None:
    """Check that the second process did what was not committed, once, and generated what was not recorded."""
    missing = outcome.end.digests.keys() - outcome.between.digests.keys()
    assert outcome.again.bodies == Counter(missing)
    assert set(outcome.killed.bodies.values()) <= ({1, 2} if wanted.retried else {1})
    for place, manifest in outcome.end.manifests.items():
        begun, recorded = outcome.killed.bodies[place], attempts(outcome.between, place)
        assert begun - 1 <= recorded <= begun  # a kill by another thread may come between the two
        assert (recorded if place in missing else 0) <= manifest.attempt <= (place in missing or begun > 1)
    assert sorted(outcome.again.pieces) == sorted(outcome.end.pieces - outcome.between.pieces)
    check_no_token_is_sampled_again(outcome)


def check_no_token_is_sampled_again(outcome: Outcome) -> None:
    """Check that the second process samples no response of a recorded piece, but for those that measure whether the
    engine repeats itself, and that the stored increments of each response follow one another."""
    look, recorded, begun = outcome.end, outcome.between.seeds, outcome.again.bodies
    measured = sum(look.manifests[place].metrics.get("sampled_again", 0) for place in begun)
    assert sum(seed in recorded for seed in outcome.again.sampled) == measured
    ends: Counter[tuple[str, int]] = Counter()
    for key in sorted(look.keys):
        if (piece := layout.piece_of_increment(key)) is not None:
            for one in records.read(look.root, key, IncrementRecord).grown():
                assert one.first == ends[piece, one.row], key
                ends[piece, one.row] += len(one.tokens)
    assert ends


def check_rows(look: Look) -> None:
    """Check that there are as many rows as requested, and none twice."""
    rollouts = [manifest for (_, stage), manifest in look.manifests.items() if stage == Stage.ROLLOUT]
    assert len(rollouts) == ITERATIONS
    for manifest in rollouts:
        assert len(set(rows_of(look, manifest))) == len(rows_of(look, manifest)) == PROMPTS * SAMPLES


def rows_of(look: Look, manifest: Manifest) -> list[tuple[str, int]]:
    table = read_table(look.root, manifest, ROLLOUT, ["prompt_id", "sample_id"])
    return list(zip(table["prompt_id"].to_pylist(), table["sample_id"].to_pylist(), strict=True))


def check_storage(outcome: Outcome) -> None:
    """Check that everything reads as written; objects that nothing names are incomplete writes from before the kill."""
    found = verify(outcome.end.root, RUN)
    assert found.sound, found.findings
    for finding in found.findings:
        assert finding.fault is Problem.ORPHANED
        assert layout.is_temporary(finding.key)
        assert finding.key in outcome.between.keys
