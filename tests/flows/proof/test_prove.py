"""Refusals and report of a proof. The proof itself is in tests/integration/test_faults.py."""

import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from flows.proof.faults import Fault
from flows.proof.prove import RUN, ProofOrder, ProofReport, _check_empty, check_regenerate, prove, report_lines
from storage.backends.root import open_root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import commit
from storage.ownership.lease import hold
from tasks.config.environment import Settings, with_faults
from tasks.config.run import RunConfig
from tasks.config.stored import record_config
from tasks.stages.names import Stage
from tests.flows.runs import make_manifest
from tests.forked_python import forked_python

REPORT = {
    "whole": "file:///w", "interrupted": "file:///i", "iterations": 2, "rollouts": "stored",
    "kills_planned": 1, "kills_delivered": 1, "points": ("train@1:upload:flow",), "points_missed": (), "starts": 2,
    "done_twice": (), "orphans": (), "manifests": 13, "states": 3, "weights": 10, "optimizer": 20,
    "rng": 5, "rows": 99, "metrics": 42, "planted": False, "differences": (), "determinism": "nowhere",
}  # fmt: skip


def order(config: RunConfig, iterations: int = 3, **changes) -> ProofOrder:
    section = config.run.model_copy(update={"iterations": iterations})
    given = {"path": "run.toml", "settings": (), "root": "memory://", "kills": 3, "seed": 0, **changes}
    return ProofOrder(config=config.model_copy(update={"run": section}), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Fault(Stage.TRAIN, 4, Point.STARTED), "this run of 3 iterations never reaches that point"),
        (Fault(Stage.REWARD, 1, Point.UPLOAD), "never reaches that point"),
        (Fault(Stage.ROLLOUT, 1, Point.MID_PART), "--regenerate"),
        (
            Fault(Stage.TRAIN, 1, Point.UPLOAD, "trainer-1"),
            "no process 'trainer-1', only flow, node, trainer-0",
        ),
    ],
)
def test_a_point_that_cannot_come_is_refused_before_anything_starts(config: RunConfig, given: Fault, message: str):
    with pytest.raises(InputError, match=message):
        prove(order(config, at=(given,)), output=None)  # pyright: ignore[reportArgumentType] - refused before


@pytest.mark.parametrize(
    ("deterministic", "cards", "refused"),
    [(False, ("0",), True), ("trainer", ("0",), True), (True, ("0",), False), (False, (), False)],
)
def test_to_sample_again_is_refused_where_engines_would_give_other_samples(config, deterministic, cards, refused):
    changed = config.model_copy(update={"device": config.device.model_copy(update={"deterministic": deterministic})})
    settings = Settings(ray_address=None, gpus=cards)
    check_regenerate(order(changed), settings)  # learns from stored rollouts
    told = pytest.raises(InputError, match=re.escape("--set device.deterministic=true")) if refused else nullcontext()
    with told:
        check_regenerate(order(changed, regenerate=True), settings)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "the interrupted run ended in the same bits"),
        ({"differences": ("train of iteration 2: x", "more")}, "first difference: train of iteration 2: x"),
        ({"points_missed": ("train@1:upload:flow",)}, "never reached: train@1:upload:flow"),
        ({"done_twice": ("reward of iteration 1",)}, "done twice: reward of iteration 1"),
        ({"orphans": ("7 raylet",)}, "still running: 7 raylet"),
    ],
)
def test_nothing_may_differ_be_missed_be_done_twice_or_be_left(change: dict, line: str):
    report = ProofReport.model_validate({**REPORT, **change})
    assert report.identical == (not change)
    assert line in report_lines(report)


@pytest.mark.slow
def test_a_root_that_holds_a_proof_is_refused(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    commit(open_root(str(tmp_path / "whole")), make_manifest(RUN, 0, Stage.PREPARE))
    words = ["-m", "flows", "prove-resume", "infra/examples/demo.toml", "--root", str(tmp_path)]
    command = [forked_python(tmp_path_factory, "command"), *words]
    done = subprocess.run(command, text=True, capture_output=True, env=with_faults(tmp_path / "none"), check=False)
    assert done.returncode == 2
    assert "already holds a proof: give another --root" in done.stderr


def test_a_root_in_which_a_proof_failed_to_start_is_taken(tmp_path: Path, config: RunConfig):
    root = open_root(str(tmp_path / "whole"))
    record_config(root, RUN, config)
    with hold(root, RUN, "ratchet run"):
        pass
    _check_empty(str(tmp_path), root, open_root(str(tmp_path / "interrupted")))
