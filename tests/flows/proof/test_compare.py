"""Comparing two runs without train states: differences are found, and named in the order of work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flows.proof.compare import Pair, column_difference
from storage.backends.root import Root, open_root
from storage.manifest import Manifest, commit
from storage.parts import PartWriter
from storage.schema import REWARD
from tasks.stages.names import WORKFLOW, Stage
from tests.flows.runs import make_manifest
from tests.storage.tables import scored_table

ROWS = 8
Change = Callable[[Manifest], Manifest]


def rewards(values: list[float]) -> pa.Table:
    return scored_table(pa.table({"prompt_id": ["p"] * ROWS, "sample_id": pa.array(range(ROWS), pa.int32())}), values)


def make_run(root: Root, change: Change = lambda manifest: manifest, score: float = 1.0) -> Root:
    for iteration in (0, 1):
        for stage in map(Stage, WORKFLOW.stages_of(iteration)):
            manifest = make_manifest("a", iteration, stage, writer=root.url)
            if stage == Stage.REWARD:
                table = rewards([0.0] * (ROWS - 1) + [score])
                part = PartWriter(root, "a", iteration, stage).write_table("rewards.arrow", table, REWARD)
                manifest = manifest.model_copy(update={"parts": (part,)})
            if stage != Stage.TRAIN:
                commit(root, change(manifest))
    return root


@pytest.fixture
def left(tmp_path: Path) -> Root:
    return make_run(open_root(str(tmp_path / "left")))


def differences(left: Root, right: Root) -> list[str]:
    return [str(found) for found in Pair(left, right, "a").compare(1, 1).differences if found.stage != Stage.TRAIN]


def test_runs_that_took_other_times_in_other_processes_are_equal(left: Root, tmp_path: Path):
    def slower(manifest: Manifest) -> Manifest:
        metrics = {**manifest.metrics, "seconds": 9.0, "tokens_per_second": 1.0, "process_to_gradient_s": 2.0}
        return manifest.model_copy(update={"metrics": metrics, "attempt": 3})

    right = make_run(open_root(str(tmp_path / "right")), slower)
    assert differences(left, right) == []
    counted = Pair(left, right, "a").compare(1, 1)
    assert counted.manifests == 7
    assert counted.rows == ROWS
    assert counted.metrics == 4


def test_a_metric_that_differs_in_its_last_bit_is_named(left: Root, tmp_path: Path):
    def change(manifest: Manifest) -> Manifest:
        if manifest.stage != Stage.EVALUATE or manifest.iteration != 1:
            return manifest
        return manifest.model_copy(update={"metrics": {"reward_mean": 1.0000000000000002}})

    found = differences(left, make_run(open_root(str(tmp_path / "right")), change))
    assert found == ["evaluate of iteration 1: metric reward_mean: 1.0 against 1.0000000000000002"]


@pytest.mark.parametrize(
    ("stage", "of_engines"), [(Stage.EVALUATE, True), (Stage.WEIGHT_SYNC, True), (Stage.REWARD, False)]
)
def test_what_engines_measured_is_compared_only_if_they_repeat_it(
    left: Root, tmp_path: Path, stage: Stage, of_engines: bool
):
    def change(manifest: Manifest) -> Manifest:
        other = {"metrics": {"probe_diff_mean": 0.5}} if manifest.stage == stage else {}
        return manifest.model_copy(update=other)

    right = make_run(open_root(str(tmp_path / "right")), change)
    assert {one.stage for one in Pair(left, right, "a").compare(1, 1).differences} >= {stage}
    found = Pair(left, right, "a", engines=False).compare(1, 1).differences
    assert (stage in {one.stage for one in found}) != of_engines


def test_a_row_that_differs_is_named(left: Root, tmp_path: Path):
    found = differences(left, make_run(open_root(str(tmp_path / "right")), score=0.5))
    assert found[0] == "reward of iteration 1: column reward: 1 of 8 rows differ, first row 7: 1.0 against 0.5"
    assert found[1].startswith("reward of iteration 1: the manifest's identity is ")


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ([0.5] * 500 + [1.0], [0.5] * 500 + [2.0], "row 1, element 500: 1.0 against 2.0"),
        ([[1, 2], [3]], [[1, 2], [4]], "row 1, element 1, element 0: 3 against 4"),
        ([1, 2], [1], "row 1: [1, 2] against [1]"),
    ],
)
def test_of_a_row_of_many_values_the_first_that_differs_is_named(ours: list[Any], theirs: list[Any], told: str):
    (found,) = column_difference("logprobs", pa.array([ours[:1], ours]), pa.array([ours[:1], theirs]))
    assert found == f"column logprobs: 1 of 2 rows differ, first {told}"


def test_a_fact_that_differs_is_named(left: Root, tmp_path: Path):
    def change(manifest: Manifest) -> Manifest:
        return manifest.model_copy(update={"facts": {"cursor": 4}}) if manifest.stage == Stage.PREPARE else manifest

    found = differences(left, make_run(open_root(str(tmp_path / "right")), change))
    assert found[0] == "prepare of iteration 0: cursor: None against 4"


def test_stages_that_are_missing_are_named(left: Root, tmp_path: Path):
    found = Pair(left, open_root(str(tmp_path / "right")), "a").compare(1, 1).differences
    assert str(found[0]) == "prepare of iteration 0: it is not committed in one of the runs"
    assert len(found) == 9
