"""Saved states: continuing bit for bit, continuing under another layout, and a state's description of itself."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest

from storage.errors import InputError, StorageError
from tests.trainer_core.models import random_examples, random_samples, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig
from trainer_core.state.facts import StateFacts, check_modules
from trainer_core.state.files import Region, SavedState

LAYOUTS = {
    "single": ParallelConfig(),
    "pp2": ParallelConfig(pipeline=2),
    "tp2": ParallelConfig(tensor=2),
    "dp2": ParallelConfig(data=2),
    "tp2pp2": ParallelConfig(tensor=2, pipeline=2),
    "vpp2": ParallelConfig(pipeline=2, virtual_pipeline=2),
}
SMALL = ("single", "pp2", "tp2", "dp2")
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
    """Numbers from every random generator of the rank, which advances them."""
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
    export(trainer, f"{folder}/at-save")
    return {
        "names": saved.names,
        "identity": saved.identity,
        "children": children,
        **third_iteration(trainer, f"{folder}/uninterrupted"),
    }


def load_train(trainer, folder, target):
    info = trainer.load(f"{folder}/saved")
    export(trainer, f"{folder}/{target}-loaded")
    return {"info": info, **third_iteration(trainer, f"{folder}/{target}")}


def third_iteration(trainer, folder):
    drawn = draws()
    metrics = trainer.train_policy(random_samples(3), 1.0)
    trainer.save(f"{folder}-state")
    export(trainer, folder)
    return {"draws": drawn, "metrics": metrics}


def plain_tensors(directory):
    """Every tensor of a state, by its name; as float32, which holds bfloat16 exactly."""
    state = SavedState(Path(directory))
    wholes = {name: Region((0,) * len(tensor.size), tensor.size) for name, tensor in state.tensors.items()}
    return {name: state.read(name, whole).float().numpy() for name, whole in wholes.items()}


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
    """Draws of a probe, and the comparison of generators afterwards, in a model that draws as GPU kernels do."""
    import torch

    trainer.import_model()
    drawn = []
    trainer._model.modules[0].register_forward_pre_hook(lambda *_: drawn.append(float(torch.rand(1))))
    before = torch.get_rng_state().tolist()
    trainer.logprobs([np.arange(1, 9, dtype=np.int32)])
    return drawn, before == torch.get_rng_state().tolist()


def test_looking_at_a_state_does_not_move_the_generators(model_dir):
    ((drawn, unmoved),) = run_trainers(model_dir, configuration(), look)
    assert drawn
    assert unmoved


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*SMALL, "vpp2"])
def test_training_goes_on_bit_by_bit(model_dir, saved, layout):
    folder, uninterrupted = saved(layout)
    resumed = run_trainers(model_dir, configuration(LAYOUTS[layout]), load_train, folder, "resumed")
    for before, after in zip(uninterrupted, resumed, strict=True):
        assert after["info"].rng == "restored"
        assert after["draws"] == before["draws"]
        assert after["metrics"] == before["metrics"]
    assert_bitwise(read_export(f"{folder}/resumed"), read_export(f"{folder}/uninterrupted"))
    # weights, and both moments of the optimizer
    states = [plain_tensors(f"{folder}/{name}-state") for name in ("resumed", "uninterrupted")]
    moments = {name for name in states[0] if name.startswith("optimizer.state.exp_avg")}
    assert len(moments) == 2 * sum(not name.startswith("optimizer.") for name in states[0])
    assert_bitwise(*states)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"), [("pp2", "tp2"), ("tp2", "single"), ("dp2", "pp2"), ("single", "dp2"), ("pp2", "dp2")]
)
def test_a_state_loads_under_another_layout(model_dir, saved, source, target):
    folder, before = saved(source)
    ranks = run_trainers(model_dir, configuration(LAYOUTS[target]), load_train, folder, target)
    info = ranks[0]["info"]
    assert info.rng == "reseeded"
    assert info.step == 4
    # every weight, main weight and moment, by its bits and its place
    assert info.identity.differences(before[0]["identity"], generators=False) == []
    assert info.identity.generators != before[0]["identity"].generators
    assert_bitwise(read_export(f"{folder}/{target}-loaded"), read_export(f"{folder}/at-save"))
    # the step after it uses the moments: Adam with lost ones would move weights by the learning rate, 6e-4 here
    resharded, uninterrupted = read_export(f"{folder}/{target}"), read_export(f"{folder}/uninterrupted")
    assert max(np.abs(resharded[name] - uninterrupted[name]).max() for name in resharded) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("vpp2", "pp2"), ("pp2", "vpp2")])
def test_virtual_stages_are_no_part_of_a_state(model_dir, saved, source, target):
    """The same ranks with their layers divided otherwise: the generators continue too, and every bit is the same."""
    folder, before = saved(source)
    ranks = run_trainers(model_dir, configuration(LAYOUTS[target]), load_train, folder, target)
    assert [rank["info"].rng for rank in ranks] == ["restored", "restored"]
    assert ranks[0]["info"].identity == before[0]["identity"]
    assert [rank["draws"] for rank in ranks] == [rank["draws"] for rank in before]
    assert_bitwise(read_export(f"{folder}/{target}-loaded"), read_export(f"{folder}/at-save"))
    assert ranks[0]["metrics"] == pytest.approx(before[0]["metrics"], rel=1e-4)


@pytest.mark.slow
def test_each_rank_names_its_own_files_and_leaves_no_process(saved):
    folder, ranks = saved("pp2")
    names = [name for rank in ranks for name in rank["names"]]
    files = {path.name for path in Path(folder, "saved").iterdir()}
    assert sorted(names) == sorted(name for name in files if not name.endswith(".mapped"))
    assert "trainer.json" in ranks[0]["names"]
    assert [rank["children"] for rank in ranks] == [[], []]


def identities(trainer, folder):
    """Identities by name: of one state saved twice, of the next, and of one that differs in its generators alone."""
    found = {}
    trainer.import_model()
    trainer.train_policy(random_samples(1), 1.0)
    draws()
    for name in ("once", "twice"):
        found[name] = trainer.save(f"{folder}/{name}").identity
    trainer.train_policy(random_samples(2), 1.0)
    found["next"] = trainer.save(f"{folder}/next").identity
    draws()
    found["drawn"] = trainer.save(f"{folder}/drawn").identity
    return found


def identities_of_another_process(trainer, folder):
    loaded = trainer.load(f"{folder}/once").identity
    trainer.train_policy(random_samples(2), 1.0)
    return {"once": loaded, "next": trainer.save(f"{folder}/next by another process").identity}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SMALL)
def test_the_same_state_has_the_same_identity(model_dir, tmp_path, layout):
    first = run_trainers(model_dir, configuration(LAYOUTS[layout]), identities, str(tmp_path))
    second = run_trainers(model_dir, configuration(LAYOUTS[layout]), identities_of_another_process, str(tmp_path))
    assert all(rank == first[0] for rank in first)
    assert first[0]["once"] == first[0]["twice"] == second[0]["once"]
    assert first[0]["next"] == second[0]["next"]
    assert first[0]["next"].differences(first[0]["once"], generators=False) == ["tensors", "progress"]
    assert first[0]["drawn"].differences(first[0]["next"], generators=True) == ["generators"]


def nudge_each_tensor(trainer):
    """Identities of the state with the last bit of one element changed, for every tensor that this rank owns."""
    import torch

    from trainer_core.state.shards import owned

    trainer.import_model()
    trainer.train_policy(random_samples(1), 1.0)
    saver, optimizer = trainer._saver, trainer._optimizer
    facts = StateFacts(
        step=1, optimizer_updates=1, optimizer=OPTIMIZER, parallel=LAYOUTS["single"], precision="fp32",
        transformer_engine=False,
    )  # fmt: skip
    found = {"": saver.identity(optimizer, facts)}
    for shard in list(owned(saver._tensors, optimizer)):
        bits = shard.values.view(torch.int32)
        bits[0] ^= 1
        found[shard.box.name] = saver.identity(optimizer, facts)
        bits[0] ^= 1
    assert saver.identity(optimizer, facts) == found[""]
    return found


@pytest.mark.slow
def test_every_tensor_counts(model_dir):
    (found,) = run_trainers(model_dir, configuration(), nudge_each_tensor)
    assert len({identity.tensors for identity in found.values()}) == len(found) == 1 + 3 * 10


def warm_up_and_save(trainer, folder):
    trainer.import_model()
    trainer.train_supervised(random_examples(), steps=3, batch_size=8, optimizer=WARM_UP)
    trainer.save(f"{folder}/warmed")
    trainer.train_policy(random_samples(), 1.0)
    export(trainer, f"{folder}/straight")


def load_warmed(trainer, folder):
    info = trainer.load(f"{folder}/warmed")
    metrics = trainer.train_policy(random_samples(), 1.0)
    export(trainer, f"{folder}/resumed")
    return info, metrics


def test_the_warm_up_leaves_a_fresh_optimizer(model_dir, tmp_path):
    run_trainers(model_dir, configuration(), warm_up_and_save, str(tmp_path))
    ((info, metrics),) = run_trainers(model_dir, configuration(), load_warmed, str(tmp_path))
    assert info.step == 3
    assert info.optimizer_updates == 0
    assert info.optimizer == OPTIMIZER
    assert metrics["learning_rate"] == pytest.approx(1e-3 * 2 / 3)  # second update of a warm-up of three
    assert_bitwise(read_export(tmp_path / "resumed"), read_export(tmp_path / "straight"))


def go_on_with_other_settings(trainer, folder):
    """Settings of a fork with another learning rate after loading, and the distance of its next update."""
    info = trainer.load(f"{folder}/saved")
    kept = trainer.save(f"{folder}/forked").identity
    metrics = trainer.train_policy(random_samples(3), 1.0)
    return info, kept, metrics["learning_rate"]


@pytest.mark.slow
def test_other_settings_of_the_optimizer_keep_its_moments(model_dir, saved):
    folder, before = saved("single")
    other = OPTIMIZER.model_copy(update={"learning_rate": 3e-3, "beta1": 0.8})
    ((info, kept, rate),) = run_trainers(model_dir, configuration(optimizer=other), go_on_with_other_settings, folder)
    assert info.optimizer == OPTIMIZER
    assert info.rng == "restored"
    assert info.identity == before[0]["identity"]
    # the moments and the place in the schedule are the saved ones; the settings are new
    assert kept.tensors == before[0]["identity"].tensors
    assert kept.differences(before[0]["identity"], generators=True) == ["progress"]
    (again,) = run_trainers(model_dir, configuration(), go_on_with_other_settings, folder)
    assert rate == pytest.approx(3 * again[2])


def refusal(trainer, directory):
    with pytest.raises((InputError, StorageError)) as caught:
        trainer.load(directory)
    return str(caught.value)


def test_a_state_of_another_precision_is_refused(model_dir, saved):
    folder, _ = saved("single")
    (message,) = run_trainers(model_dir, configuration(precision="bf16"), refusal, f"{folder}/saved")
    assert "the state is in fp32, but the trainer computes in bf16" in message


def load_all_ways(trainer, folder):
    """The refusals of a state as a whole, and as a reference; None if it was accepted."""

    def attempt(load, *args):
        try:
            load(*args)
        except InputError as error:
            return str(error)
        return None

    return [
        attempt(trainer.load, folder),
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


@pytest.mark.slow
def test_bf16_goes_on_bit_by_bit(model_dir, tmp_path):
    settings = configuration(precision="bf16")
    (before,) = run_trainers(model_dir, settings, train_save_train, str(tmp_path))
    (after,) = run_trainers(model_dir, settings, load_train, str(tmp_path), "resumed")
    assert after["metrics"] == before["metrics"]
    assert after["info"].identity == before["identity"]
    states = [plain_tensors(f"{tmp_path}/{name}-state") for name in ("resumed", "uninterrupted")]
    assert_bitwise(*states)
    # here the main weights are not the weights
    assert sum(name.startswith("optimizer.state.param.") for name in states[0]) == 10
