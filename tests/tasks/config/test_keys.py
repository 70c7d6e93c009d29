"""Each key is declared once, with marks; of the keys that decide results a stage reads those that are marked for it."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from storage.backends.root import open_root
from tasks.config.identity import is_read, is_runtime
from tasks.config.keys import key_at, leaves_of
from tasks.config.run import RunConfig
from tasks.stages.names import Stage
from tests.small.config import small_config
from tests.small.driving import Driver
from tests.small.here import WorkersHere

PER_KEY = dict(leaves_of(RunConfig))

ALSO_READ = {
    # prompts must leave room for these lengths; every use of stored prompts checks them again
    "prepare: rollout.max_tokens",
    "prepare: train.max_length",
    # trainer ranks are started with it, and stay up behind the stage that needs them
    "weight-sync: run.seed",
    "evaluate: run.seed",
    # the limits of the probe are wider for bf16 and for FP8; a sync is accepted or not, and delivers the same
    "weight-sync: train.precision",
    "weight-sync: train.fp8",
}
"""Settings that a stage reads without being decided by them."""


def test_every_key_says_which_stages_it_decides():
    """Mark it, or the table that it is in, with decides(STAGE, ...) or RUNTIME."""
    stages, marked = {stage.value for stage in Stage}, {path: key.mark.stages for path, key in PER_KEY.items()}
    assert [path for path, given in marked.items() if given is None or not stages >= {*given}] == []


def test_secrets_and_places_are_marked():
    assert [path for path, key in PER_KEY.items() if key.mark.secret] == ["model.token"]
    files = [path for path, key in PER_KEY.items() if key.mark.place == "files"]
    assert files == ["model.source", *(f"data.{table}{end}" for table in ("train", "held_out", "warmup")
                                       for end in ("", ".source")), "train.policy.distill.teacher",
                     "train.critic.source",
                     "engines.judge.source"]  # fmt: skip
    assert [path for path, key in PER_KEY.items() if key.mark.place == "function"] == [
        "reward.function", "reward.functions.function", "environment.function", "train.policy.advantage.function",
        "train.policy.loss.function", "engine.function", "report.trackers",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "there"),
    [("reward.arguments.scale.deep", "reward"), ("train.policy.loss.beta", "train"), ("rollout.sample", None)],
)
def test_a_value_in_a_free_table_has_the_marks_of_the_table(path: str, there: str | None):
    assert (key_at(RunConfig, path) is not None) == (there is not None)
    assert is_read(path, there or "rollout") is (there is not None)
    assert not is_runtime(path)


def recorded[M: BaseModel](model: M, seen: Callable[[str], object], prefix: str = "") -> M:
    """A copy of a configuration that tells of each key that is read from it."""
    kind = type(model)

    def read(self: BaseModel, name: str):
        if name in kind.model_fields:
            seen(f"{prefix}{name}")
        return kind.__getattribute__(self, name)

    def dumped(self: BaseModel, *, include: set[str] | None = None, **more: Any):
        for name in (include or set()) & set(kind.model_fields):
            seen(f"{prefix}{name}")
        return kind.model_dump(self, include=include, **more)

    values = {name: recorded(value, seen, f"{prefix}{name}.") if isinstance(value, BaseModel) else value
              for name, value in dict(model).items()}  # fmt: skip
    copy = model.model_copy(update=values)
    telling = type(kind.__name__, (kind,), {"__getattribute__": read, "model_dump": dumped})
    object.__setattr__(copy, "__class__", telling)
    return copy


@pytest.mark.slow
def test_a_stage_reads_no_setting_that_decides_results_and_is_not_marked_for_it(tmp_path):
    read: dict[Stage, set[str]] = defaultdict(set)
    under_way: list[Stage] = []

    class Noting(Driver):
        def _noted(self, stage, iteration, work, inputs):
            under_way.append(stage)
            try:
                return super()._noted(stage, iteration, work, inputs)
            finally:
                under_way.pop()

    config = recorded(small_config(), lambda key: under_way and read[under_way[-1]].add(key))
    (tmp_path / "scratch").mkdir()
    Noting(open_root(str(tmp_path / "runs")), config, tmp_path / "scratch", WorkersHere(config)).drive()
    leaves = {stage: {key for key in keys if key in PER_KEY} for stage, keys in read.items()}
    assert {"rollout.samples", "run.seed"} <= leaves[Stage.ROLLOUT]
    assert len(leaves) == 6
    unmarked = {
        f"{stage}: {key}"
        for stage, keys in leaves.items()
        for key in keys
        if PER_KEY[key].mark.stages and not is_read(key, stage)
    }
    assert unmarked == ALSO_READ
