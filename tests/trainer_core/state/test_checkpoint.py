"""Saved states: continuing bit for bit, continuing under another layout, and what a state says about itself."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest

from storage.errors import InputError, StorageError
from tests.trainer_core.models import random_examples, random_samples, read_export
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig
from trainer_core.state.facts import StateFacts, check_modules

LAYOUTS = {
    "single": ParallelConfig(),
    "pp2": ParallelConfig(pipeline=2),
    "tp2": ParallelConfig(tensor=2),
    "dp2": ParallelConfig(data=2),
}
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3, warmup_steps=3, decay="cosine", decay_steps=20, weight_decay=0.1, clip_grad=0.5
)
WARM_UP = OptimizerConfig(learning_rate=5e-3)


def configuration(parallel=LAYOUTS["single"], optimizer=OPTIMIZER, precision="fp32"):
    return TrainerConfig(
        parallel=parallel,
        optimizer=optimizer,
        policy=PolicyConfig(mini_batches=2),
        precision=precision,
        micro_batch_size=3,
        max_length=64,
    )


def draws():
    """Something from every random generator of the rank, which advances them."""
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        forked = torch.rand(2).tolist()
    return [random.random(), np.random.random(), *torch.rand(2).tolist(), *forked]


def train_save_train(trainer, folder):
    """Two iterations, a state, then a third iteration without interruption."""
    trainer.import_model()
    for seed in (1, 2):
        trainer.train_policy(random_samples(seed), 1.0)
    draws()
    saved = trainer.save(f"{folder}/saved")
    children = [process.name() for process in psutil.Process().children()]
    trainer.export(f"{folder}/at-save")
    return {"names": saved.names, "identity": saved.identity, "children": children, **third_iteration(trainer, f"{folder}/uninterrupted")}


def load_train(trainer, folder, target):
    info = trainer.load(f"{folder}/saved")
    trainer.export(f"{folder}/{target}-loaded")
    return {"info": info, **third_iteration(trainer, f"{folder}/{target}")}


def third_iteration(trainer, folder):
    drawn = draws()
    metrics = trainer.train_policy(random_samples(3), 1.0)
    trainer.save(f"{folder}-state")
    trainer.export(folder)
    return {"draws": drawn, "metrics": metrics}


def plain_tensors(rank, world_size, store, directory):
    """Every tensor of a state, by its name in the checkpoint; as float32, which holds bfloat16 exactly."""
    import torch
    from megatron.core import dist_checkpointing

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    loaded = dist_checkpointing.load_plain_tensors(directory)
    return {name: tensor.float().numpy() for name, tensor in loaded.items() if torch.is_tensor(tensor)}


@pytest.fixture(scope="module")
def saved(model_dir, tmp_path_factory):
    """Results of `train_save_train` by layout, each computed once."""
    done = {}

    def save(layout):
        if layout not in done:
            folder = str(tmp_path_factory.mktemp(layout))
            done[layout] = folder, run_trainers(model_dir, configuration(LAYOUTS[layout]), train_save_train, folder)
        return done[layout]

    return save


def assert_bitwise(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []


def look(trainer):
    """What a probe draws, and whether the generators end as before, in a model that draws as GPU kernels do."""
    import torch

    trainer.import_model()
    drawn = []
    trainer._model.module.register_forward_pre_hook(lambda *_: drawn.append(float(torch.rand(1))))
    before = torch.get_rng_state().tolist()
    trainer.logprobs([np.arange(1, 9, dtype=np.int32)])
    return drawn, before == torch.get_rng_state().tolist()


def test_looking_at_a_state_does_not_move_the_generators(model_dir):
    ((drawn, unmoved),) = run_trainers(model_dir, configuration(), look)
    assert drawn
    assert unmoved


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_bit_by_bit(model_dir, saved, layout):
    folder, uninterrupted = saved(layout)
    resumed = run_trainers(model_dir, configuration(LAYOUTS[layout]), load_train, folder, "resumed")
    for before, after in zip(uninterrupted, resumed, strict=True):
        assert after["info"].rng == "restored"
        assert after["draws"] == before["draws"]
        assert after["metrics"] == before["metrics"]
    assert_bitwise(read_export(f"{folder}/resumed"), read_export(f"{folder}/uninterrupted"))
    # weights, and both moments of the optimizer
    states = [run_ranks(1, plain_tensors, f"{folder}/{name}-state")[0] for name in ("resumed", "uninterrupted")]
    moments = {name for name in states[0] if name.startswith("optimizer.state.exp_avg")}
    assert len(moments) == 2 * sum(not name.startswith("optimizer.") for name in states[0])
    assert_bitwise(*states)


@pytest.mark.parametrize(
    ("source", "target"), [("pp2", "tp2"), ("tp2", "single"), ("dp2", "pp2"), ("single", "dp2"), ("pp2", "dp2")]
)
def test_a_state_loads_under_another_layout(model_dir, saved, source, target):
    folder, _ = saved(source)
    ranks = run_trainers(model_dir, configuration(LAYOUTS[target]), load_train, folder, target)
    info = ranks[0]["info"]
    assert info.rng == "reseeded"
    assert info.saved_parallel == LAYOUTS[source]
    assert info.step == 4
    assert_bitwise(read_export(f"{folder}/{target}-loaded"), read_export(f"{folder}/at-save"))
    # the step after it uses the moments: Adam with lost ones would move weights by the learning rate, 6e-4 here
    resharded, uninterrupted = read_export(f"{folder}/{target}"), read_export(f"{folder}/uninterrupted")
    assert max(np.abs(resharded[name] - uninterrupted[name]).max() for name in resharded) < 2e-5


def test_each_rank_names_its_own_files_and_leaves_no_process(saved):
    folder, ranks = saved("pp2")
    names = [name for rank in ranks for name in rank["names"]]
    assert sorted(names) == sorted(path.name for path in Path(folder, "saved").iterdir())
    assert "trainer.json" in ranks[0]["names"]
    assert [rank["children"] for rank in ranks] == [[], []]


def save_twice(trainer, folder):
    trainer.import_model()
    trainer.train_policy(random_samples(1), 1.0)
    draws()
    trainer.save(f"{folder}/once")
    trainer.save(f"{folder}/twice")
    trainer.train_policy(random_samples(2), 1.0)
    trainer.save(f"{folder}/next")
    trainer.train_policy(random_samples(3), 1.0)
    draws()
    trainer.save(f"{folder}/last")  # earlier saves have told the process which rank writes what


def load_save_train_save(trainer, folder):
    trainer.load(f"{folder}/once")
    trainer.save(f"{folder}/by another process")
    trainer.train_policy(random_samples(2), 1.0)
    trainer.save(f"{folder}/next by another process")


def load_train_save(trainer, folder):
    trainer.load(f"{folder}/next")
    trainer.train_policy(random_samples(3), 1.0)
    draws()
    trainer.save(f"{folder}/last by another process")


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_state_is_the_same_bytes(model_dir, tmp_path, layout):
    for body in (save_twice, load_save_train_save, load_train_save):
        run_trainers(model_dir, configuration(LAYOUTS[layout]), body, str(tmp_path))
    others = [(name, f"{name} by another process") for name in ("next", "last")]
    for left, right in [("once", "twice"), ("once", "by another process"), *others]:
        files, again = files_of(tmp_path / left), files_of(tmp_path / right)
        assert files.keys() == again.keys()
        assert [name for name in files if files[name] != again[name]] == [], (left, right)
    assert files_of(tmp_path / "once")["__0_0.distcp"] != files_of(tmp_path / "next")["__0_0.distcp"]


def warm_up_and_save(trainer, folder):
    trainer.import_model()
    trainer.train_supervised(random_examples(), steps=3, batch_size=8, optimizer=WARM_UP)
    trainer.save(f"{folder}/warmed")
    trainer.train_policy(random_samples(), 1.0)
    trainer.export(f"{folder}/straight")


def load_warmed(trainer, folder, target, fresh_optimizer):
    info = trainer.load(f"{folder}/warmed", fresh_optimizer)
    metrics = trainer.train_policy(random_samples(), 1.0)
    trainer.export(f"{folder}/{target}")
    return info, metrics


def test_the_warm_up_leaves_a_fresh_optimizer(model_dir, tmp_path):
    run_trainers(model_dir, configuration(), warm_up_and_save, str(tmp_path))
    (info, metrics), *_ = run_trainers(model_dir, configuration(), load_warmed, str(tmp_path), "resumed", False)
    assert info.step == 3
    assert info.optimizer_updates == 0
    assert info.optimizer == OPTIMIZER
    assert metrics["learning_rate"] == pytest.approx(1e-3 * 2 / 3)  # second update of a warm-up of three
    # a fresh optimizer is what the state holds, so that asking for one changes nothing
    run_trainers(model_dir, configuration(), load_warmed, str(tmp_path), "fresh", True)
    for target in ("resumed", "fresh"):
        assert_bitwise(read_export(tmp_path / target), read_export(tmp_path / "straight"))


def refusal(trainer, directory):
    with pytest.raises((InputError, StorageError)) as caught:
        trainer.load(directory)
    return str(caught.value)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (configuration(optimizer=WARM_UP), ["0.005", "0.001", "fresh optimizer"]),
        (configuration(precision="bf16"), ["fp32", "bf16", "fresh optimizer"]),
    ],
    ids=["optimizer", "precision"],
)
def test_a_state_of_another_kind_is_refused(model_dir, saved, other, names):
    folder, _ = saved("single")
    (message,) = run_trainers(model_dir, other, refusal, f"{folder}/saved")
    assert all(name in message for name in names)


def load_all_ways(trainer, folder):
    """The refusals of a state as a whole, for its weights alone, and as a reference; None where it was accepted."""

    def attempt(load, *args):
        try:
            load(*args)
        except InputError as error:
            return str(error)
        return None

    return [
        attempt(trainer.load, folder),
        attempt(trainer.load, folder, True),
        attempt(trainer.load_reference, folder, "reference"),
    ]


def test_a_state_of_other_modules_is_refused(model_dir, saved, tmp_path):
    folder = str(shutil.copytree(Path(saved("single")[0], "saved"), tmp_path / "copy"))
    path = Path(folder, "trainer.json")
    facts = json.loads(path.read_text())
    assert facts["transformer_engine"] is False
    path.write_text(json.dumps({**facts, "transformer_engine": True}))
    (messages,) = run_trainers(model_dir, configuration(), load_all_ways, folder)
    for message in messages:
        assert folder in message
        assert "saved by Transformer Engine's modules" in message
        assert "built from Megatron's own modules" in message
        assert "is installed" in message
    # a state from before this was recorded
    path.write_text(json.dumps({name: value for name, value in facts.items() if name != "transformer_engine"}))
    assert run_trainers(model_dir, configuration(), load_all_ways, folder) == [[None, None, None]]


def test_with_transformer_engine_a_state_without_is_refused():
    facts = StateFacts(
        step=1, optimizer_updates=1, optimizer=OPTIMIZER, parallel=LAYOUTS["single"], precision="fp32",
        transformer_engine=False,
    )  # fmt: skip
    check_modules("here", facts, transformer_engine=False)
    with pytest.raises(InputError, match="is not installed"):
        check_modules("here", facts, transformer_engine=True)


def test_a_missing_state_is_named(model_dir, tmp_path):
    (message,) = run_trainers(model_dir, configuration(), refusal, str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in message


def test_bf16_goes_on_bit_by_bit(model_dir, tmp_path):
    settings = configuration(precision="bf16")
    (before,) = run_trainers(model_dir, settings, train_save_train, str(tmp_path))
    (after,) = run_trainers(model_dir, settings, load_train, str(tmp_path), "resumed")
    assert after["metrics"] == before["metrics"]
    states = [run_ranks(1, plain_tensors, f"{tmp_path}/{name}-state")[0] for name in ("resumed", "uninterrupted")]
    assert_bitwise(*states)
