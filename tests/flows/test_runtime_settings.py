"""A run is killed in the middle of a rollout and continued under other runtime settings, each setting both ways. It has
the same rows and weights as an uninterrupted run."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import need
from storage.parts import read_table
from storage.schema import REWARD, ROLLOUT
from tasks.config.keys import leaves_of
from tasks.config.run import RunConfig
from tasks.stages.names import Stage
from tests.small.config import PROMPTS, SAMPLES, small_config
from tests.small.driving import RUN, Killed, driver, killing

SETTINGS: dict[str, tuple[Any, Any]] = {
    "run.iterations": (1, 2),
    "run.retries": (0, 3),
    "run.outage_s": (60, 900),
    "rollout.groups_per_part": (1, 4),
    "rollout.increments.tokens": (2, 3),
    "rollout.increments.seconds": (10.0, 1.0),
    "reward.deadline_s": (5.0, 9.0),
    "reward.processes": (0, 1),
    "reward.max_failures": (0.1, 0.0),
    "reward.start_deadline_s": (60.0, 90.0),
    "reward.try": (True, False),
    "train.parallel.tensor": (1, 2),
    "train.parallel.pipeline": (1, 2),
    "train.parallel.data": (1, 2),
    "train.parallel.context": (1, 2),
    "train.parallel.virtual_pipeline": (2, 4),
    "train.parallel.layers_first_stage": (1, 2),
    "train.parallel.layers_last_stage": (1, 2),
    "train.parallel.sequence": ("false", "true"),
    "train.parallel.expert": (1, 2),
    "train.parallel.expert_tensor": (1, 2),
    "train.megatron.overlap_grad_reduce": ("false", "true"),
    "train.megatron.overlap_param_gather": ("false", "true"),
    "train.megatron.recompute": ("none", "layers"),
    "train.megatron.attention": ("auto", "flash"),
    "train.megatron.gradient_accumulation_fusion": ("false", "true"),
    "train.megatron.output_gradient_accumulation_fusion": ("false", "true"),
    "train.megatron.cuda_graphs": ("false", "true"),
    "train.memory.offload_parameters": ("false", "true"),
    "train.memory.drop_gradients": ("false", "true"),
    "train.memory.offload_optimizer": ("false", "true"),
    "train.micro_batch_size": (8, 2),
    "train.micro_batch_tokens": (64, 16),
    "train.policy.kl_sample": (0, 4),
    "evaluate.every": (1, 0),
    "evaluate.prompts": (2, 1),
    "evaluate.pass": ("reward >= 1", "reward >= 0.5"),
    "engine.count": (1, 2),
    "engine.tensor": (1, 2),
    "engine.cards": ("shared", "own"),
    "engine.max_model_len": (128, 64),
    "engine.max_num_seqs": (512, 2),
    "engine.kv_cache_mib": (128, 64),
    "engine.gpu_memory_utilization": (0.4, 0.5),
    "engine.cuda_graphs": ("false", "true"),
    "engine.async_scheduling": ("false", "true"),
    "engine.own_process": ("false", "true"),
    "engine.sleep": ("false", "true"),
    "workers.standby": (0, 1),
    "workers.start_deadline_s": (60, 70),
    "workers.call_deadline_s": (60, 70),
    "workers.step_deadline_s": (60, 70),
    "device.kind": ("auto", "cpu"),
    "device.deterministic": ("false", "true"),
    "sync.transport": ("memory", "auto"),
    "sync.arena_mib": (256, 1),
    "sync.in_flight": ("abort", "keep"),
    "sync.probe_sequences": (8, 1),
    "sync.max_mean_difference": (1e-3, 1.0),
    "sync.max_difference": (5e-3, 1.0),
    "storage.save_every": (1, 2),
    "storage.keep_newest": (1, 2),
    "storage.keep_every": (1, 2),
    "report.examples": (0, 2),
}
NEEDS = {
    "storage.keep_every": ["storage.keep_newest=1"],
    "train.parallel.virtual_pipeline": ["train.parallel.pipeline=2"],
    "train.parallel.layers_first_stage": ["train.parallel.pipeline=2"],
    "train.parallel.layers_last_stage": ["train.parallel.pipeline=2"],
    "train.parallel.sequence": ["train.parallel.tensor=2"],
    "train.parallel.expert": ["train.parallel.data=2"],
    "train.parallel.expert_tensor": ["train.parallel.tensor=2"],
}
"""Settings without which another setting is refused."""
LAYOUT = "train.parallel."
OTHERS = [name for name in SETTINGS if not name.startswith(LAYOUT)]
TOGETHER = [*([name] for name in SETTINGS if name.startswith(LAYOUT)), *(OTHERS[first::6] for first in range(6))]
"""Settings that CI changes at once; of a layout's, many exclude others."""
NOT_HERE = {
    "run.name": "the id of the run",
    "model.source": "this run's model is generated; what it was is in the digests of `prepare`",
    "data.train": "as model.source",
    "data.held_out": "as model.source",
    "data.warmup": "as model.source",
    "model.download": "as model.source",
    "model.token": "as model.source",
    "model.accept": "as model.source",
    "report.wandb": "who is told; see tests/flows/views/test_reports.py",
    "report.mlflow": "as report.wandb",
    "report.viewer": "as report.wandb; see tests/flows/views/test_page.py",
    "report.trackers": "as report.wandb; see tests/flows/views/test_trackers.py",
    "data.accept": "what it accepts is refused before `prepare`, and recorded then",
    "data.download": "this run's prompts are generated; it only matters before `prepare`",
    **{
        f"data.{table}.{key}": "as model.source"
        for table in ("train", "held_out", "warmup")
        for key in ("source", "format", "split", "subset")
    },
    "train.policy.distill.teacher": "as model.source; see tests/flows/test_distilling.py",
    "train.critic.source": "as model.source; see tests/flows/test_critic.py",
    "engines.judge.source": "as model.source; see tests/tasks/rewards/test_engine_judge.py",
    "engines.judge.max_num_seqs": "answers depend on the question alone; see tests/tasks/rewards/test_engine_judge.py",
    "engines.judge.kv_cache_mib": "as engines.judge.max_num_seqs",
    "engines.judge.gpu_memory_utilization": "as engines.judge.max_num_seqs",
    **dict.fromkeys(
        (f"environment.{key}" for key in ("processes", "retries", "seconds", "memory_mib")),
        "as reward.deadline_s; see tests/tasks/environments",
    ),
}


def test_every_runtime_setting_is_in_the_table():
    """Also those of tables that this run has not."""
    runtime = {name for name, key in leaves_of(RunConfig) if key.mark.stages == ()}
    assert runtime == SETTINGS.keys() | NOT_HERE.keys()


def settings(values: dict[str, Any]) -> RunConfig:
    needed = [setting for name in values for setting in NEEDS.get(name, [])]
    return small_config(["run.iterations=1", *needed, *(f"{name}={value}" for name, value in values.items())])


def drive(root: Root, scratch: Path, config: RunConfig, **more: Any) -> None:
    driver(root, config, scratch, **more).drive()


def look(root: Root) -> tuple[pa.Table, pa.Table, object, list[str]]:
    """Rows and rewards of iteration 1, the resulting weights, and the digests of iteration 0."""
    rows = read_table(root, need(root, RUN, 1, Stage.ROLLOUT), ROLLOUT).combine_chunks()
    rewards = read_table(root, need(root, RUN, 1, Stage.REWARD), REWARD).combine_chunks()
    weights = need(root, RUN, 1, Stage.WEIGHT_SYNC).facts["weights_digest"]
    return rows, rewards, weights, [need(root, RUN, 0, stage).digest for stage in (Stage.PREPARE, Stage.WEIGHT_SYNC)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """The result of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    root = open_root(str(folder / "root"))
    drive(root, folder / "scratch", small_config(["run.iterations=1"]))
    return look(root)


@pytest.mark.slow
@pytest.mark.parametrize("way", [0, 1], ids=["there", "back"])
@pytest.mark.parametrize(
    "names", [*TOGETHER, *(pytest.param([name], marks=pytest.mark.full, id=name) for name in OTHERS)], ids="+".join
)
def test_settings_that_change_while_the_run_is_down_change_no_result(names, way, whole, root: Root, tmp_path: Path):
    before, after = ({name: SETTINGS[name][place] for name in names} for place in (way, 1 - way))
    with pytest.raises(Killed):
        interruption = killing(Stage.ROLLOUT, 1, Point.MID_PART, after=1)
        drive(root, tmp_path / "first", settings(before), at=interruption)
    drive(root, tmp_path / "second", settings(after))
    rows, rewards, weights, begun = look(root)
    assert rows.num_rows == PROMPTS * SAMPLES
    assert rows.equals(whole[0])
    assert rewards.equals(whole[1])
    assert weights == whole[2]
    if not names[0].startswith(LAYOUT):  # the state of iteration 0 records the layout
        assert begun == whole[3]


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_a_run_never_mixes_precisions(before, after, root: Root, tmp_path: Path):
    with pytest.raises(Killed):
        interruption = killing(Stage.ROLLOUT, 1, Point.MID_PART, after=1)
        drive(root, tmp_path / "first", settings({"engine.precision": before}), at=interruption)
    with pytest.raises(InputError, match=f"engine.precision: the run was started with '{before}', .* '{after}'"):
        drive(root, tmp_path / "second", settings({"engine.precision": after}))


def test_a_piece_of_an_earlier_version_is_sampled_again(whole, root: Root, tmp_path: Path):
    """The name of such a piece was only a number, which does not say which groups are in it."""
    with pytest.raises(Killed):
        drive(root, tmp_path / "first", settings({}), at=killing(Stage.ROLLOUT, 1, Point.MID_PART, 1))
    (piece,) = root.keys(f"{RUN}/manifests/000001/rollout.r0.pieces")
    served = need(root, RUN, 0, Stage.WEIGHT_SYNC).digest
    root.put_if_absent(f"{RUN}/manifests/000001/rollout.r0.pieces/00001-{served[:12]}.json", root.read_bytes(piece))
    root.remove(piece)
    drive(root, tmp_path / "second", settings({}))
    assert look(root)[0].equals(whole[0])
    assert "sampled_again" not in need(root, RUN, 1, Stage.ROLLOUT).metrics
