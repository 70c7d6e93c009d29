"""A stage reads every setting that decides a result; a setting of another stage does not undo a stage."""

from pathlib import Path

import pytest

from tasks.config.identity import (
    STAGES,
    changed_settings,
    is_read,
    leaves,
    meaning,
    reads,
    settings_digest,
    split_changes,
    unchangeable,
    with_settings,
)
from tasks.config.run import RunConfig
from tasks.stages.names import LOOP, WORKFLOW, Stage
from tests.small.config import small_config


def document(*settings: str):
    return small_config(settings).model_dump(mode="json")


def test_every_setting_that_decides_a_result_is_read_by_a_stage():
    unread = [key for key in leaves(meaning(document())) if not any(is_read(key, stage) for stage in Stage)]
    assert unread == []


def test_the_marks_name_every_stage_and_no_other():
    assert {stage.value for stage in Stage} == STAGES


def test_the_table_of_the_documents_is_this_one():
    text = (Path(__file__).parents[3] / "docs" / "storage.md").read_text()
    order = ("prepare", "rollout", "reward", "select", "rescore", "train", "weight-sync", "evaluate")
    rows = [f"| `{stage}` | {', '.join(f'`{name}`' for name in reads(stage))} |" for stage in order]
    assert set(order) == STAGES
    assert "\n".join(rows) in text


@pytest.mark.parametrize(
    ("setting", "readers"),
    [
        ("train.optimizer.learning_rate=0.5", {Stage.TRAIN}),
        ("rollout.temperature=0.5", {Stage.ROLLOUT, Stage.TRAIN}),
        ('reward.function="words"', {Stage.REWARD, Stage.EVALUATE}),
        ("run.seed=3", {Stage.PREPARE, Stage.ROLLOUT, Stage.TRAIN}),
        ("train.micro_batch_size=3", set()),
        ("evaluate.prompts=1", set()),
    ],
)
def test_a_setting_changes_the_stages_that_read_it(setting: str, readers: set[Stage]):
    before, after = document(), document(setting)
    assert {stage for stage in LOOP if settings_digest(before, stage) != settings_digest(after, stage)} == readers


def test_what_a_stage_before_has_read_cannot_change():
    settings = ["rollout.temperature", "train.optimizer.learning_rate", "warmup.steps", "engine.precision", "run.seed"]
    behind = (Stage.TRAIN, *WORKFLOW.behind[Stage.TRAIN])
    assert unchangeable(small_config(), dict.fromkeys(settings), behind) == [
        "rollout.temperature", "warmup.steps", "engine.precision", "run.seed",
    ]  # fmt: skip
    behind = (Stage.ROLLOUT, *WORKFLOW.behind[Stage.ROLLOUT])
    assert "rollout.temperature" not in unchangeable(small_config(), dict.fromkeys(settings), behind)


def test_changes_are_found_and_made():
    before = document()
    after = document("train.optimizer.learning_rate=0.5", "train.micro_batch_size=3", "rollout.samples=7")
    changed = changed_settings(before, after)
    assert with_settings(before, changed) == after
    assert before == document()
    assert split_changes(before, after) == (
        {"train.optimizer.learning_rate": 0.5, "rollout.samples": 7}, {"train.micro_batch_size": 3},
    )  # fmt: skip
    for settings in (
        ("train.lora.rank=4", "train.lora.alpha=8", "train.micro_batch_size=3"),
        ('train.policy.distill.teacher="t"', "train.policy.kl_coefficient=0"),
        ("train.critic.learning_rate=1e-3", "train.policy.advantage.type=gae"),
        ('engines.judge.source="j"', "reward.function=reward_model"),
        ("train.experts.replay=true", "rollout.ahead=1", "train.policy.old_policy=behaviour"),
    ):
        after = document(*settings)
        changed, back = changed_settings(before, after), changed_settings(after, before)
        assert not {"", "train", "train.policy", "rollout"} & {*changed, *back}
        assert RunConfig.model_validate(with_settings(before, changed)) == RunConfig.model_validate(after)
        assert RunConfig.model_validate(with_settings(after, back)) == RunConfig.model_validate(before)
    assert changed_settings({"a": {"kind": "x", "p": 1}}, {"a": {"kind": "y"}}) == {"a": {"kind": "y"}}
