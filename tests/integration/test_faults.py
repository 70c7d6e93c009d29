"""Tier 2 of the fault matrix: real processes of the real stack are killed, one after another, in one run.

Every kind of process, every stage and every named point is covered at least once. The run is the tiny one over two
pipeline ranks; `ratchet prove-resume` compares the result of the killed run with that of the uninterrupted run.
"""

import json
from pathlib import Path

import pytest

from flows.proof.compare import Comparison, Pair
from flows.proof.faults import Fault, FaultFolder
from flows.proof.prove import RUN, ProofOrder, judge
from flows.views.output import Output
from storage.backends.root import Root, open_root
from storage.kill_points import Point
from storage.manifest import need
from storage.parts import read_table
from storage.schema import ROLLOUT
from storage.upkeep.verify import verify
from tasks.config.document import load_config
from tasks.stages.names import LOOP, Stage
from tests.integration.command import TINY, Finished, finish, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ITERATIONS = 2
CELLS = [
    "prepare@0:parts-done:flow",
    "evaluate@0:started:engine-0",
    "rollout@1:parts-done:flow",  # with all pieces there, one of which the next process samples again
    "train@1:mid-part:trainer-0",
    "weight-sync@1:sent:engine-0",
    "weight-sync@1:served:flow",
    "reward@2:committed:node",
    "train@2:started:trainer-1",
    "train@2:upload:flow",
]
GROUPS_PER_PIECE = 4
LAYOUT = ["--set", "train.parallel.pipeline=2", "--set", f"rollout.groups_per_part={GROUPS_PER_PIECE}"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("proof")


@pytest.fixture(scope="module")
def proof(place: Path) -> Finished:
    """The command, with every cell in one run, and each run sampling for itself."""
    points = [word for cell in CELLS for word in ("--at", cell)]
    arguments = ["--root", str(place / "runs"), "--iterations", str(ITERATIONS), "--regenerate", "--json"]
    process = start("prove-resume", str(TINY), *arguments, *points, *LAYOUT, home=place / "prefect")
    return finish(process, deadline_s=1700)


@pytest.fixture
def roots(place: Path, proof: Finished) -> tuple[Root, Root]:
    assert proof.out, proof.err
    whole, interrupted = (open_root(str(place / "runs" / name)) for name in ("whole", "interrupted"))
    return whole, interrupted


def test_the_cells_meet_every_process_every_stage_and_every_point():
    faults = [Fault.parse(cell) for cell in CELLS]
    assert {fault.stage for fault in faults} == set(LOOP)
    assert {fault.point for fault in faults} == set(Point)
    assert {fault.victim for fault in faults} == {"flow", "node", "trainer-0", "trainer-1", "engine-0"}


def test_the_killed_run_comes_to_the_same_bit_for_bit(proof: Finished):
    assert proof.code == 0, proof.err + proof.out
    report = proof.json
    assert report["points"] == CELLS, "every kill was delivered"
    assert report["identical"] is True
    assert report["starts"] > sum(cell.endswith(":flow") for cell in CELLS)
    assert report["done_twice"] == report["orphans"] == report["differences"] == []
    assert report["manifests"] == 4 + 5 * ITERATIONS
    assert report["states"] == 1 + ITERATIONS
    assert min(report[name] for name in ("weights", "optimizer", "rng", "rows", "metrics")) > 0
    assert "engine repeated its samples" in report["determinism"]


def test_no_row_is_there_twice_and_everything_stored_is_sound(roots: tuple[Root, Root]):
    _, interrupted = roots
    for iteration in range(1, ITERATIONS + 1):
        manifest = need(interrupted, RUN, iteration, Stage.ROLLOUT)
        table = read_table(interrupted, manifest, ROLLOUT, ["prompt_id", "sample_id"])
        names = set(zip(table["prompt_id"].to_pylist(), table["sample_id"].to_pylist(), strict=True))
        assert len(names) == table.num_rows == 16 * 8
    assert verify(interrupted, RUN).sound


def test_a_rollout_that_went_on_says_that_the_engine_repeated_itself(roots: tuple[Root, Root]):
    whole, interrupted = roots
    metrics = need(interrupted, RUN, 1, Stage.ROLLOUT).metrics
    assert metrics["sampled_again"] == metrics["sampled_again_equal"] == GROUPS_PER_PIECE * 8
    assert "sampled_again" not in need(whole, RUN, 1, Stage.ROLLOUT).metrics


def test_attempts_are_counted(roots: tuple[Root, Root]):
    whole, interrupted = roots
    assert need(whole, RUN, 1, Stage.ROLLOUT).attempt == 0
    assert need(interrupted, RUN, 1, Stage.ROLLOUT).attempt == 1


def test_one_bit_is_found_by_name(roots: tuple[Root, Root]):
    def compared(plant: int | None) -> Comparison:
        return Pair(*roots, RUN).compare(ITERATIONS, 1, plant)

    assert compared(None).differences == ()
    (found,) = compared(7).differences
    assert (found.iteration, found.stage) == (ITERATIONS, Stage.TRAIN)
    assert "1 of " in found.what


def test_with_a_planted_bit_the_verdict_is_a_failure_that_names_it(roots: tuple[Root, Root], tmp_path: Path, capfd):
    folder = FaultFolder(tmp_path)
    folder.plan([])
    config = load_config(str(TINY), LAYOUT[1::2])
    order = ProofOrder(config, str(TINY), (), str(tmp_path), kills=0, seed=0, regenerate=True, plant=True)
    with Output(json=True) as output:
        assert judge(order, *roots, folder, 1, output) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["identical"] is False
    assert report["planted"] is True
    assert len(report["differences"]) == 1
    assert report["first_difference"].startswith(f"train of iteration {ITERATIONS}: ")
    assert f"at train of iteration {ITERATIONS}; everything after it" in report["determinism"]
