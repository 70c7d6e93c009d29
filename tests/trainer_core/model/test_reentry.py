"""One long-lived trainer: overlapped communication changes no bit, whatever happens between two trainings."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage.errors import NumericsError, RatchetError
from tests.trainer_core.models import random_samples, random_sequences, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_trainers
from trainer_core.config import MegatronConfig, OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig

LAYOUTS = {
    "dp2": ParallelConfig(data=2),
    "pp2-dp2": ParallelConfig(pipeline=2, data=2),
    "tp2-dp2": ParallelConfig(tensor=2, data=2),
    "tp2": ParallelConfig(tensor=2),
    "pp2": ParallelConfig(pipeline=2),
    "vpp2-dp2": ParallelConfig(pipeline=2, virtual_pipeline=2, data=2),
}
OVERLAPS = {
    "gradients": MegatronConfig(overlap_grad_reduce=True),
    "both": MegatronConfig(overlap_grad_reduce=True, overlap_param_gather=True),
}
EVENTS = ("train", "score", "save", "load", "export", "reference")


def configuration(parallel, megatron=None):
    return TrainerConfig(
        parallel=parallel,
        megatron=megatron or MegatronConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        policy=PolicyConfig(mini_batches=2, kl_coefficient=0.1),  # nothing gathers the weights after an update
        micro_batch_size=4,
        max_length=64,
    )


def events(seed):
    """Events in a random order, after a training and before one."""
    generator = np.random.default_rng(seed)
    drawn = [*EVENTS, *generator.choice(EVENTS, 2)]
    return ["train", "export", *generator.permutation(drawn).tolist(), "train", "export"]


def live(trainer, folder, order):
    """Visible results of each event."""
    trainer.import_model()
    trainer.save(f"{folder}/0")
    trainer.load_reference(f"{folder}/0", "reference")
    saved, seen = 0, []
    for number, event in enumerate(order):
        if event == "train":
            seen.append(trainer.train_policy(random_samples(number), 1.0, reference=True))
        elif event == "score":
            seen.append([values.tobytes() for values in trainer.logprobs(random_sequences())])
        elif event == "save":
            saved = number + 1
            trainer.save(f"{folder}/{saved}")
        elif event == "load":
            trainer.load(f"{folder}/{saved}")
        elif event == "export":
            export(trainer, f"{folder}/export-{number}")
        elif event == "reference":
            trainer.load_reference(f"{folder}/0", "reference")
    return seen


def lived(model_dir, settings, order):
    """Visible results on rank 0, and the bytes of every export."""
    with tempfile.TemporaryDirectory() as folder:
        seen = run_trainers(model_dir, settings, live, folder, order)[0]
        exports = [read_export(path) for path in sorted(Path(folder).glob("export-*"))]
    return seen, [{name: tensor.tobytes() for name, tensor in export.items()} for export in exports]


@pytest.fixture(scope="module")
def plainly(model_dir):
    """The same without overlap, each layout and order once."""
    done = {}

    def look(layout, seed):
        if (layout, seed) not in done:
            done[layout, seed] = lived(model_dir, configuration(LAYOUTS[layout]), events(seed))
        return done[layout, seed]

    return look


@pytest.mark.parametrize(
    ("layout", "seed", "overlap"),
    [
        pytest.param("dp2", 1, "gradients", marks=pytest.mark.slow),
        ("dp2", 1, "both"),
        pytest.param("pp2-dp2", 3, "both", marks=pytest.mark.full),  # CI has it with virtual stages
        pytest.param("tp2-dp2", 4, "both", marks=pytest.mark.slow),
        pytest.param("tp2", 5, "both", marks=pytest.mark.full),  # CI has these beside data parallelism
        pytest.param("pp2", 6, "both", marks=pytest.mark.full),
        pytest.param("vpp2-dp2", 7, "both", marks=pytest.mark.slow),
    ],
)
def test_overlap_changes_no_bit_in_any_order_of_events(plainly, model_dir, layout, seed, overlap):
    found = lived(model_dir, configuration(LAYOUTS[layout], OVERLAPS[overlap]), events(seed))
    expected = plainly(layout, seed)
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert len({tuple(export.values()) for export in found[1]}) > 1  # the weights moved between exports


def live_and_go_on(trainer, folder, order):
    live(trainer, folder, order)
    trainer.save(f"{folder}/last")
    return step_with_reference(trainer, f"{folder}/on")


def begin_again(trainer, folder):
    trainer.load(f"{folder}/last")
    trainer.load_reference(f"{folder}/0", "reference")
    return step_with_reference(trainer, f"{folder}/again")


def step_with_reference(trainer, folder):
    metrics = trainer.train_policy(random_samples(99), 1.0, reference=True)
    export(trainer, folder)
    return metrics


@pytest.mark.parametrize(
    ("layout", "seed"), [("dp2", 8), *[pytest.param(*one, marks=pytest.mark.slow) for one in (("tp2", 9), ("pp2", 10))]]
)
def test_a_trainer_that_has_seen_much_goes_on_as_a_fresh_process(model_dir, tmp_path, layout, seed):
    settings = configuration(LAYOUTS[layout], OVERLAPS["both"])
    old = run_trainers(model_dir, settings, live_and_go_on, str(tmp_path), events(seed))
    fresh = run_trainers(model_dir, settings, begin_again, str(tmp_path))
    assert fresh == old
    assert fresh[0]["grad_norm"] > 0
    left, right = read_export(tmp_path / "on"), read_export(tmp_path / "again")
    assert all(left[name].tobytes() == right[name].tobytes() for name in left)


def write_while_reading(trainer):
    """The errors if something that may only read changes a weight, or a buffer, and if it may write."""
    import torch

    trainer.import_model()
    (module,) = trainer._model.modules
    module.register_buffer("bias", torch.zeros(3))
    said = []
    for tensor in (module.bias, next(module.parameters()).detach()):
        with pytest.raises(RatchetError) as caught, trainer._model.weights("readable"):
            tensor.add_(1)
        said.append(str(caught.value))
        with trainer._model.weights("writable"):
            tensor.add_(1)
    with trainer._model.weights("readable"):
        float(module.bias.sum())
    return said


def test_what_may_only_read_cannot_write(model_dir):
    ((buffer, weight),) = run_trainers(model_dir, configuration(ParallelConfig()), write_while_reading)
    assert buffer == weight
    assert "changed by what may only read them" in weight


def fail_with_a_moving_buffer(trainer, folder):
    """A buffer that each pass moves, as the biases of routers, after an update that fails and one that does not."""
    import torch

    trainer.import_model()
    (module,) = trainer._model.modules
    module.register_buffer("bias", torch.zeros(3))
    trainer.save(folder)
    trainer.load_reference(folder, "reference")

    def move(*_):
        if torch.is_grad_enabled():
            module.bias.add_(1)

    module.register_forward_hook(move)
    samples = random_samples()
    broken = replace(samples, rewards=np.where(np.arange(16) == 0, np.inf, samples.rewards).astype(np.float32))
    with pytest.raises(NumericsError):
        trainer.train_policy(broken, 1.0, reference=True)
    failed = module.bias.tolist()
    trainer.train_policy(samples, 1.0, reference=True)
    return failed, module.bias.tolist()


def test_an_update_that_fails_leaves_buffers_as_they_were(model_dir, tmp_path):
    ((failed, moved),) = run_trainers(
        model_dir, configuration(ParallelConfig()), fail_with_a_moving_buffer, str(tmp_path)
    )
    assert failed == [0, 0, 0]
    assert moved[0] > 0


def step(trainer, folder):
    import torch

    trainer.import_model()
    kept, after_forward = [], []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    trainer._model.chunks[0].register_forward_hook(lambda *_: after_forward.append(sum(kept)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        metrics = trainer.train_policy(random_samples(), 1.0)
    export(trainer, folder)
    return metrics, after_forward[0]


@pytest.mark.parametrize("recompute", [pytest.param("attention", marks=pytest.mark.slow), "layers"])
def test_recomputing_activations_changes_no_bit_and_keeps_fewer(model_dir, tmp_path, recompute):
    plain, other = (
        run_trainers(model_dir, settings, step, str(tmp_path / name))[0]
        for name, settings in {
            "plain": TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64),
            "other": TrainerConfig(
                optimizer=OptimizerConfig(learning_rate=1e-3),
                max_length=64,
                megatron=MegatronConfig(recompute=recompute),
            ),
        }.items()
    )
    assert other[0] == plain[0]
    assert other[1] < {"attention": 1.0, "layers": 0.5}[recompute] * plain[1]
    left, right = read_export(tmp_path / "plain"), read_export(tmp_path / "other")
    assert all(np.array_equal(left[name], right[name]) for name in left)


def swapped(trainer):
    """Buffers after a reference was in place, loaded from a state with another value of one."""
    import torch

    trainer.import_model()
    (module,) = trainer._model.modules
    module.register_buffer("bias", torch.zeros(3))
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(folder)
        trainer.load_reference(folder, "reference")
    module.bias.fill_(2)
    with trainer._reference.in_place():
        inside = module.bias.tolist()
    return inside, module.bias.tolist()


def test_a_reference_takes_buffers_too_and_puts_them_back(model_dir):
    ((inside, after),) = run_trainers(model_dir, configuration(ParallelConfig()), swapped)
    assert inside == [0, 0, 0]
    assert after == [2, 2, 2]
