"""The order of the stages; a continued run does only what is missing: the real loop over small workers."""

from pathlib import Path

import pyarrow as pa
import pytest

from storage.backends.root import Root
from storage.errors import CommitConflict, LeaseHeld
from storage.kill_points import Point
from storage.manifest import Manifest, commit, need
from storage.ownership.lease import check_free, hold
from storage.parts import PartWriter, read_table
from storage.schema import EVALUATION, REWARD, ROLLOUT
from storage.upkeep.catalog import contents
from tasks.config.run import RunConfig
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tests.small.config import SAMPLES, small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.storage.s3 import s3_server
from tests.storage.tables import scored_table

FULL = [Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE]
BEGIN = [Stage.PREPARE, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE]


def asked_for(iterations: int) -> RunConfig:
    return small_config([f"run.iterations={iterations}"])


def drive(root: Root, tmp_path: Path, iterations: int, **more):
    process = driver(root, asked_for(iterations), tmp_path / "scratch", **more)
    process.drive()
    return process.done


def test_a_new_run_does_every_stage_in_order(root: Root, tmp_path: Path):
    expected = [(0, stage, False) for stage in BEGIN] + [(n, stage, False) for n in (1, 2) for stage in FULL]
    assert drive(root, tmp_path, 2) == expected


@pytest.mark.slow
def test_a_run_on_an_object_store_has_the_manifests_of_one_on_files(root: Root, tmp_path: Path):
    drive(root, tmp_path, 2)
    with s3_server() as server:
        bucket = server.root("same")
        drive(bucket, tmp_path / "s3", 2)
        ours, theirs = (contents(one, RUN).newest for one in (root, bucket))
    assert [one.digest for one in ours] == [one.digest for one in theirs]
    assert len(ours) == len(BEGIN) + 2 * len(FULL)


def test_every_stage_is_made_from_the_manifests_before_it(root: Root, tmp_path: Path):
    drive(root, tmp_path, 2)

    def digest(stage: Stage, iteration: int) -> str:
        return need(root, RUN, iteration, stage).digest

    prepared = digest(Stage.PREPARE, 0)
    assert {stage: need(root, RUN, 2, stage).inputs for stage in FULL} == {
        Stage.ROLLOUT: {
            "prepare": prepared,
            "weights": digest(Stage.WEIGHT_SYNC, 1),
            "drawn": digest(Stage.ROLLOUT, 1),
        },
        Stage.REWARD: {"prepare": prepared, "rollout": digest(Stage.ROLLOUT, 2)},
        Stage.TRAIN: {
            "prepare": prepared,
            "rollout": digest(Stage.ROLLOUT, 2),
            "reward": digest(Stage.REWARD, 2),
            "state": digest(Stage.TRAIN, 1),
        },
        Stage.WEIGHT_SYNC: {"prepare": prepared, "train": digest(Stage.TRAIN, 2)},
        Stage.EVALUATE: {"prepare": prepared, "weights": digest(Stage.WEIGHT_SYNC, 2)},
    }


def test_a_complete_run_does_nothing_more(root: Root, tmp_path: Path):
    drive(root, tmp_path, 1)
    assert drive(root, tmp_path, 1) == []


def test_a_run_is_prolonged_without_a_look_at_what_is_finished(root: Root, tmp_path: Path):
    drive(root, tmp_path, 1)
    assert drive(root, tmp_path, 2) == [(2, stage, False) for stage in FULL]


def test_an_interrupted_iteration_continues_at_its_first_missing_stage(root: Root, tmp_path: Path):
    with pytest.raises(Killed):
        drive(root, tmp_path, 2, at=killing(Stage.TRAIN, 2, Point.STARTED))
    done = drive(root, tmp_path, 2)
    assert done == [(2, stage, stage in (Stage.ROLLOUT, Stage.REWARD)) for stage in FULL]


def test_what_the_former_driver_published_late_counts(root: Root, tmp_path: Path):
    late = []

    def publish(context: RunContext, point: Point, key: str) -> None:
        """Let the previous holder publish another result while this process works."""
        if late or point is not Point.STARTED or not key.endswith("000001/reward.r0.json"):
            return
        context.outbox.settle()  # the rollout is published
        rollouts = need(root, RUN, 1, Stage.ROLLOUT)
        inputs = {"prepare": need(root, RUN, 0, Stage.PREPARE).digest, "rollout": rollouts.digest}
        part = PartWriter(root, RUN, 1, Stage.REWARD).write_table("rewards.arrow", others(root, rollouts), REWARD)
        given = {"stage": Stage.REWARD, "inputs": inputs, "parts": (part,), "facts": {}, "epoch": 0}
        late.append(commit(root, rollouts.model_copy(update=given)))

    done = drive(root, tmp_path, 2, at=publish)
    assert need(root, RUN, 1, Stage.REWARD) == late[0]
    assert (1, Stage.REWARD, True) in done
    assert need(root, RUN, 1, Stage.TRAIN).inputs["reward"] == late[0].digest
    assert done[-1] == (2, Stage.EVALUATE, False)


def others(root: Root, rollouts: Manifest) -> pa.Table:
    """Rewards that the run's function never gives."""
    names = read_table(root, rollouts, ROLLOUT, ["prompt_id", "sample_id"])
    return scored_table(names, [0.125] * names.num_rows)


def test_a_result_that_nobody_may_publish_is_refused(root: Root, tmp_path: Path):
    drive(root, tmp_path, 1)
    rewards = need(root, RUN, 1, Stage.REWARD)
    with pytest.raises(CommitConflict):
        commit(root, rewards.model_copy(update={"facts": {"whose": "theirs"}}))


def test_a_run_that_is_driven_is_refused_before_anything_starts(root: Root):
    with hold(root, "a", "ratchet run"), pytest.raises(LeaseHeld, match="which is alive"):
        check_free(root, "a")
    check_free(root, "a")


def test_each_iteration_draws_the_prompts_after_those_of_the_one_before(root: Root, tmp_path: Path):
    drive(root, tmp_path, 2)
    rollouts = [need(root, RUN, iteration, Stage.ROLLOUT) for iteration in (1, 2)]
    assert [one.facts["cursor"] for one in rollouts] == [6, 12]
    seeds = [set(read_table(root, one, ROLLOUT, ["seed"])["seed"].to_pylist()) for one in rollouts]
    assert not seeds[0] & seeds[1]


def test_an_iteration_that_draws_more_prompts_than_there_are_names_each_sample_once(root: Root, tmp_path: Path):
    config = small_config(["run.iterations=1", "rollout.prompts=90", "rollout.groups_per_part=45"])
    driver(root, config, tmp_path / "scratch").drive()
    columns = ["prompt_id", "sample_id"]
    tables = [
        read_table(root, need(root, RUN, 1, stage), schema, columns)
        for stage, schema in ((Stage.ROLLOUT, ROLLOUT), (Stage.REWARD, REWARD))
    ]
    assert tables[0].equals(tables[1])
    names = set(zip(*(tables[0][column].to_pylist() for column in columns), strict=True))
    assert len(names) == tables[0].num_rows == 90 * SAMPLES
    assert len({prompt for prompt, _ in names}) < 90


def test_samples_and_answers_are_drawn_as_the_configuration_says(root: Root, tmp_path: Path):
    """Tokens from 3 on are digits; the small engine draws the first `top_k` of them, and one alone with `min_p`."""
    for run, setting, most in (("wide", "rollout.top_k=4", 6), ("narrow", "rollout.min_p=0.5", 12)):
        config = small_config(["run.iterations=1", 'rollout.stop=["12","3","7","8"]', setting])
        driver(root, config, tmp_path / run, run=run).drive()
        samples = read_table(root, need(root, run, 1, Stage.ROLLOUT), ROLLOUT)["response_tokens"].to_pylist()
        answers = read_table(root, need(root, run, 0, Stage.EVALUATE), EVALUATION)["response_tokens"].to_pylist()
        assert max(max(one) for one in samples) == most
        assert any(len(set(one)) > 2 for one in samples) == (most == 6)
        for tokens in (*samples, *answers):
            assert not {6, 10, 11} & set(tokens[:-1])
            assert tokens[-1] in (1, 6, 10, 11) or tokens[-2:] == [4, 5]
        assert any(one[-1] != 1 for one in answers)
