"""Processes of the real stack are killed, one after another, in one run on an object store.

`ratchet prove-resume` compares the result with that of an uninterrupted run, and a test with that of a run on files.
"""

import json
import os
import subprocess
import sys
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
from tests.integration.command import IN_FLIGHT, PIECES, PROJECT, TINY, run_tiny
from tests.integration.conftest import EVERY_POINT, ITERATIONS, KILLS, MID_RESPONSE, Proof

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLES_PER_PIECE = 2 * 8


@pytest.fixture
def roots(proof: Proof) -> tuple[Root, Root]:
    assert proof.done.out, proof.done.err
    whole, interrupted = (open_root(f"{proof.url}/{name}") for name in ("whole", "interrupted"))
    return whole, interrupted


def test_the_kills_meet_every_kind_of_process_and_by_hand_every_stage_and_point():
    assert {Fault.parse(kill).victim for kill in KILLS} == {"flow", "trainer-0", "engine-0"}
    faults = [Fault.parse(kill) for kill in EVERY_POINT]
    assert {fault.stage for fault in faults} == set(LOOP)
    # responses of that run end before an increment of theirs is told; those of another are long enough
    assert {fault.point for fault in faults} == set(Point) - {Point.MID_RESPONSE}
    assert {Fault.parse(kill).point for kill in MID_RESPONSE} == {Point.MID_RESPONSE}
    assert {fault.victim for fault in faults} == {"flow", "node", "trainer-0", "trainer-1", "engine-0"}


def test_the_killed_run_comes_to_the_same_bit_for_bit(proof: Proof):
    assert proof.done.code == 0, proof.done.err + proof.done.out
    report = proof.done.json
    assert report["points"] == proof.kills, "every kill was delivered"
    assert report["identical"] is True
    assert report["starts"] == 1 + sum(kill.endswith((":flow", ":node")) for kill in proof.kills)
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
    assert metrics["sampled_again"] == metrics["sampled_again_equal"] == SAMPLES_PER_PIECE
    assert "sampled_again" not in need(whole, RUN, 1, Stage.ROLLOUT).metrics


def test_attempts_are_counted(roots: tuple[Root, Root]):
    whole, interrupted = roots
    assert need(whole, RUN, 1, Stage.ROLLOUT).attempt == 0
    assert need(interrupted, RUN, 1, Stage.ROLLOUT).attempt == 1


@pytest.mark.full
def test_the_object_store_has_the_manifests_of_a_run_on_files(each_process: Proof, home: Path, tmp_path: Path):
    done = run_tiny(str(tmp_path), home, *PIECES)
    assert done.code == 0, done.err
    comparison = Pair(open_root(str(tmp_path)), open_root(f"{each_process.url}/interrupted"), RUN).compare(
        ITERATIONS, 1
    )
    assert comparison.differences == ()
    assert comparison.manifests == 4 + 5 * ITERATIONS
    assert min(comparison.weights, comparison.optimizer, comparison.rng, comparison.rows, comparison.metrics) > 0


def test_one_bit_is_found_by_name(roots: tuple[Root, Root]):
    def compared(plant: int | None) -> Comparison:
        return Pair(*roots, RUN).compare(ITERATIONS, 1, plant)

    assert compared(None).differences == ()
    (found,) = compared(7).differences
    assert (found.iteration, found.stage) == (ITERATIONS, Stage.TRAIN)
    assert "1 of " in found.what


def test_with_a_planted_bit_the_verdict_is_a_failure_that_names_it(proof: Proof, roots, tmp_path: Path, capfd):
    folder = FaultFolder(tmp_path)
    folder.plan([])
    config = load_config(str(TINY), proof.settings)
    order = ProofOrder(config, str(TINY), (), str(tmp_path), kills=0, seed=0, regenerate=True, plant=True)
    with Output(json=True) as output:
        assert judge(order, *roots, folder, 1, output) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["identical"] is False
    assert report["planted"] is True
    assert len(report["differences"]) == 1
    assert report["first_difference"].startswith(f"train of iteration {ITERATIONS}: ")
    assert f"at train of iteration {ITERATIONS}; everything after it" in report["determinism"]


@pytest.mark.full
def test_killed_at_random_moments_it_comes_to_the_same_with_updates_in_flight(home: Path, tmp_path: Path):
    fuzz = [sys.executable, "-m", "infra.fuzz_stack", str(IN_FLIGHT), "--root", str(tmp_path)]
    words = ["--iterations", "4", "--kills", "3", "--seed", "5", "--open", "1", "--within", "3"]
    environment = {**os.environ, "PREFECT_HOME": str(home)}
    done = subprocess.run([*fuzz, *words], cwd=PROJECT, env=environment, text=True, capture_output=True, timeout=1700)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "3 of 3 kills delivered" in done.stdout
