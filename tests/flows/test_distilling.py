"""On-policy distillation in the loop over small workers: the teacher is part of the run, its scores are durable."""

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.driving import ask_again
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import find, need
from storage.parts import read_parts, read_table
from storage.revisions import read_revisions
from storage.schema import ROLLOUT, TEACHER, TEACHER_TOP
from storage.upkeep.redoing import Wanted
from storage.upkeep.verify import verify
from tasks.checks import check_config, prepared_stage
from tasks.config.run import RunConfig
from tasks.config.stored import forked_config
from tasks.forking import begin_retraining, retrain_config
from tasks.stages.names import Stage
from tasks.stages.views import Trained
from tests.small.config import ITERATIONS, small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.models import made

KEY = "train.policy.distill.teacher"
ALONE = ("train.policy.kl_coefficient=0",)
TOP = ("train.policy.distill.top_k=3",)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a teacher."""
    return made(tmp_path_factory.mktemp("teacher"), 7)


def config_of(teacher: Path, *settings: str) -> RunConfig:
    return small_config([f'{KEY}="{teacher}"', *ALONE, *settings])


def driven(root: Root, scratch: Path, config: RunConfig, run: str = RUN, **more: Any):
    process = driver(root, config, scratch, run=run, **more)
    process.drive()
    return process


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Root:
    """A root with a run that distils alone."""
    folder = tmp_path_factory.mktemp("whole")
    root = open_root(str(folder / "runs"))
    driven(root, folder / "scratch", config_of(teacher))
    return root


def states(root: Root, run: str = RUN) -> list[Any]:
    return [Trained(need(root, run, n, Stage.TRAIN)).identity for n in range(ITERATIONS + 1)]


def test_a_run_that_only_distils_scores_nothing_and_keeps_the_teachers_table(whole: Root, teacher: Path):
    stored = [name for name in need(whole, RUN, 0, Stage.PREPARE).part_names if name.startswith("teacher/")]
    assert {"teacher/config.json", "teacher/model.safetensors", "teacher/tokenizer.json"} <= set(stored)
    for iteration in range(1, ITERATIONS + 1):
        assert find(whole, RUN, iteration, Stage.REWARD) is None
        samples = read_table(whole, need(whole, RUN, iteration, Stage.ROLLOUT), ROLLOUT)
        part = need(whole, RUN, iteration, Stage.TRAIN).part("teacher.arrow")
        table = read_parts(whole, [part], TEACHER)
        for name in ("prompt_id", "sample_id"):
            assert table[name].to_pylist() == samples[name].to_pylist()
        assert [len(row) for row in table["logprobs"].to_pylist()] == [
            len(row) for row in samples["logprobs"].to_pylist()
        ]
        assert max(max(row) for row in table["logprobs"].to_pylist()) < 0
    assert verify(whole, RUN).sound


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [("train.policy.distill.coefficient=0.5",), ("train.policy.distill.reward_weight=1",)]
)
def test_with_rewards_the_loop_scores_as_ever(whole: Root, teacher: Path, tmp_path: Path, settings: tuple[str, ...]):
    root = open_root(str(tmp_path / "runs"))
    process = driven(root, tmp_path / "scratch", config_of(teacher, "run.iterations=1", *settings))
    rewarded = settings[0].endswith("weight=1")
    assert ((1, Stage.REWARD, False) in process.done) is rewarded
    assert ("reward" in need(root, RUN, 1, Stage.TRAIN).inputs) is rewarded


def test_a_training_without_rewards_is_not_done_again_with_them(teacher: Path, tmp_path: Path):
    root, given = open_root(str(tmp_path / "runs")), "train.policy.distill.reward_weight=1"
    driven(root, tmp_path / "a", config_of(teacher, "run.iterations=1"))
    with pytest.raises(InputError, match=r"iteration 1 has no rewards, .*do its rollout again with them"):
        ask_again(root, RUN, Wanted(1, Stage.TRAIN, "to see", "tests"), [given])
    _, after = ask_again(root, RUN, Wanted(1, Stage.ROLLOUT, "to see", "tests"), [given])
    driven(root, tmp_path / "b", after)
    assert "reward" in need(root, RUN, 1, Stage.TRAIN, read_revisions(root, RUN)).inputs


@pytest.mark.slow
@pytest.mark.parametrize(("point", "scored_again"), [(Point.MID_PART, True), (Point.UPLOAD, False)])
def test_a_killed_run_ends_in_the_same_bits(
    whole: Root, teacher: Path, tmp_path: Path, point: Point, scored_again: bool
):
    folder = shutil.copytree(teacher, tmp_path / "teacher")
    root, config = open_root(str(tmp_path / "runs")), config_of(folder)
    with pytest.raises(Killed):
        driven(root, tmp_path / "first", config, at=killing(Stage.TRAIN, 1, point))
    shutil.rmtree(folder)  # the run has its own copy
    process = driven(root, tmp_path / "second", config)
    assert process.workers.calls.count("teacher_scores") == ITERATIONS - 1 + scored_again
    assert states(root) == states(whole)


def test_the_likeliest_tokens_are_stored_once_and_trained_on(teacher: Path, tmp_path: Path):
    found = []
    for name, points in (("whole", ()), ("killed", (Point.UPLOAD,))):
        root, config = open_root(str(tmp_path / name)), config_of(teacher, "run.iterations=1", *TOP)
        for point in points:
            with pytest.raises(Killed):
                driven(root, tmp_path / point, config, at=killing(Stage.TRAIN, 1, point))
        process = driven(root, tmp_path / f"{name}-again", config)
        assert process.workers.calls.count("teacher_scores") == (not points)
        found.append(need(root, RUN, 1, Stage.TRAIN))
    assert found[0].digest == found[1].digest
    table = read_parts(root, [found[0].part("teacher.arrow")], TEACHER_TOP)
    for own, tokens, logprobs in zip(*(table[name].to_pylist() for name in TEACHER_TOP.names[2:]), strict=True):
        assert tokens == [0, 1, 2] * len(own)
        assert [first - second for first, second in pairwise(logprobs[:3])] == pytest.approx([1, 1], abs=1e-5)
    flat = np.array(table["top_logprobs"].combine_chunks().flatten()).reshape(-1, 3)
    own = np.array(table["logprobs"].combine_chunks().flatten())
    np.testing.assert_allclose(
        flat[:, 0], own - np.arange(len(own)), rtol=0, atol=1e-5
    )  # none has the place of another


@pytest.mark.slow
def test_another_teacher_is_another_run(whole: Root, teacher: Path, tmp_path: Path):
    root = open_root(str(tmp_path / "runs"))
    other = made(tmp_path / "other", 8)
    driven(root, tmp_path / "scratch", config_of(other))
    assert states(root)[0] == states(whole)[0]
    assert states(root)[1] != states(whole)[1]
    assert need(root, RUN, 0, Stage.PREPARE).digest != need(whole, RUN, 0, Stage.PREPARE).digest


@pytest.mark.slow
def test_stored_samples_are_distilled_offline(whole: Root, teacher: Path, tmp_path: Path):
    driven(whole, tmp_path / "plain", small_config(), run="plain")
    found = []
    for run, parent, top in (("of-scored", "plain", ()), ("of-unscored", RUN, TOP)):
        given = {"start": f"{parent}@0", "select": [parent], "samples": 8}
        config = retrain_config(whole, run, given, None, [f'{KEY}="{teacher}"', *ALONE, *top])
        begin_retraining(whole, run, config)
        process = driven(whole, tmp_path / run, config, run=run)
        assert "teacher_scores" in process.workers.calls
        found.append(need(whole, run, 1, Stage.TRAIN).part("teacher.arrow").rows)
        assert need(whole, run, 0, Stage.SELECT).part("teacher/model.safetensors").bytes
    assert found == [8, 8]


def test_a_retraining_keeps_its_teacher(whole: Root, teacher: Path, tmp_path: Path):
    shutil.copytree(whole.url.removeprefix("file:"), tmp_path / "runs")
    root, folder = open_root(str(tmp_path / "runs")), shutil.copytree(teacher, tmp_path / "teacher")
    config = retrain_config(root, "again", {"start": f"{RUN}@0", "select": [RUN]}, None, [f'{KEY}="{folder}"', *ALONE])
    begin_retraining(root, "again", config)
    tokenizer, weights = folder / "tokenizer.json", folder / "model.safetensors"
    own = tokenizer.read_text()
    tokenizer.write_text(own.replace('"7"', '"seven"'))
    refused(config, root, "another tokenizer than the model", "again")
    tokenizer.write_text(own)
    with pytest.raises(Killed):
        driven(root, tmp_path / "scratch", config, run="again", at=killing(Stage.TRAIN, 1, Point.MID_PART))
    check_config(config, root, prepared_stage(root, "again"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    refused(config, root, f"{KEY} .*teacher is not the model that run 'again' was started with", "again")


def refused(config: RunConfig, root: Root, said: str, run: str = RUN) -> None:
    with pytest.raises(InputError, match=said):
        check_config(config, root, prepared_stage(root, run))


def test_a_teacher_that_cannot_score_is_refused_before_the_start(teacher: Path, tmp_path: Path):
    root, other = open_root(str(tmp_path / "runs")), shutil.copytree(teacher, tmp_path / "other")
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"7"', '"seven"'))
    refused(config_of(other), root, r"another tokenizer than the model: token \d+ is '7' for the model")
    refused(config_of(tmp_path / "none"), root, f"{KEY} {tmp_path / 'none'} does not exist")
    short = made(tmp_path / "short", 1, max_positions=64)
    refused(config_of(short), root, "has a context of 64 tokens, but train.max_length is 128")
    refused(
        config_of(teacher, "train.policy.distill.top_k=32"), root, "top_k = 32 leaves none of the model's 32 tokens"
    )
    refused(config_of(teacher, "train.parallel.tensor=4", "train.parallel.pipeline=1"), root, "cannot be divided by")


def test_a_run_keeps_its_teacher(whole: Root, teacher: Path, tmp_path: Path):
    changed = shutil.copytree(teacher, tmp_path / "changed")
    weights = bytearray((changed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "model.safetensors").write_bytes(weights)
    refused(config_of(changed), whole, f"{KEY} .*changed is not the model that run 'small' was started with")
    check_config(config_of(tmp_path / "gone"), whole, prepared_stage(whole, RUN))


def test_a_fork_gets_no_teacher_but_another_coefficient(whole: Root, teacher: Path, tmp_path: Path):
    driven(whole, tmp_path / "scratch", small_config(), run="without")
    with pytest.raises(InputError, match="has stored no teacher, so a fork of it cannot have one: start a new run, or"):
        forked_config(whole, "without", "child", [f'{KEY}="{teacher}"', *ALONE])
    distill = forked_config(whole, RUN, "child", ["train.policy.distill.coefficient=2"]).train.policy.distill
    assert distill is not None and distill.coefficient == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("train.policy.advantage.type=rloo",),
            r"train.policy: advantage has no effect with distill.reward_weight = 0",
        ),
        (("train.policy.loss.type=sft",), r"distill has no effect with loss.type = \"sft\""),
        (
            ("evaluate.every=0",),
            r"reward.function has no effect with train.policy.distill.reward_weight = 0 and",
        ),
        (("train.policy.distill.coefficient=0",), r"distill.coefficient"),
        ((*TOP, "train.policy.loss.type=gspo"), r"loss has no effect with distill.top_k and distill.reward_weight = 0"),
        ((*TOP, "train.policy.old_policy=behaviour"), r"old_policy has no effect with distill.top_k and"),
    ],
)
def test_settings_without_effect_are_refused(teacher: Path, settings: tuple[str, ...], said: str):
    with pytest.raises(InputError, match=said):
        config_of(teacher, *settings)
