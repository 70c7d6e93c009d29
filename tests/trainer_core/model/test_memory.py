"""A trainer that gives up memory between two operations computes the same bits as one that keeps it."""

import itertools
import tempfile
from dataclasses import dataclass

import numpy as np
import pytest

from storage.errors import AccumulationPending, NumericsError
from tests.trainer_core.models import make_family, random_samples, random_sequences
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import (
    MegatronConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    TrainerConfig,
)

DENSE, EXPERTS = "dense", "qwen3-moe"
OVERLAP = MegatronConfig(overlap_grad_reduce=True, overlap_param_gather=True)
ALL = MemoryConfig(offload_parameters=True, drop_gradients=True, offload_optimizer=True)
SWITCHES = tuple(MemoryConfig.model_fields)
COMBINATIONS = [
    MemoryConfig(**dict.fromkeys(names, True)) for count in (1, 2, 3) for names in itertools.combinations(SWITCHES, count)
]
EVENTS = ("train", "score", "save", "load", "export", "reference")


def configuration(parallel=None, **more):
    settings = {
        "parallel": parallel or ParallelConfig(),
        "optimizer": OptimizerConfig(learning_rate=1e-3),
        "policy": PolicyConfig(mini_batches=2, kl_coefficient=0.1),
        "micro_batch_size": 4,
        "max_length": 64,
    }
    return TrainerConfig.model_validate({**settings, **more})


@pytest.fixture(scope="module")
def folders(model_dirs, tmp_path_factory):
    """Hugging Face directories by family; the dense one shares its embedding with the output layer."""
    experts = str(tmp_path_factory.mktemp(EXPERTS))
    run_ranks(1, make_family, experts, EXPERTS)
    return {DENSE: model_dirs[True], EXPERTS: experts}


def events(seed):
    """Everything in a random order, and before each event some memory is given up, or all of it put back."""
    generator = np.random.default_rng(seed)
    order = ["train", *generator.permutation([*EVENTS, *generator.choice(EVENTS, 3)]).tolist(), "train", "export"]
    for event in order:
        for _ in range(generator.integers(0, 3)):
            yield COMBINATIONS[generator.integers(len(COMBINATIONS))]
        if generator.random() < 0.2:
            yield "resume"
        yield event


@dataclass
class Life:
    """What happens to one trainer, and what is seen of it."""

    trainer: object
    folder: str
    saved: int = 0

    def begin(self):
        self.trainer.import_model()
        self.trainer.save(f"{self.folder}/0")
        self.trainer.load_reference(f"{self.folder}/0", "reference")
        return self

    def happen(self, number, event):
        trainer, folder = self.trainer, self.folder
        if event == "train":
            return trainer.train_policy(random_samples(number), 1.0, reference=True)
        if event == "score":
            return [values.tobytes() for values in trainer.logprobs(random_sequences())]
        if event == "save":
            self.saved = number + 1
            return trainer.save(f"{folder}/{self.saved}").identity
        if event == "load":
            return trainer.load(f"{folder}/{self.saved}").identity
        if event == "export":
            with tempfile.TemporaryDirectory() as exported:
                return [record.digest for record in trainer.export(exported)]
        return trainer.load_reference(f"{folder}/0", "reference")


def storages(trainer):
    """The storages of each kind by the switch that gives it up."""
    model, optimizer = trainer._model, trainer._optimizer
    parameters = [parameter for module in model.modules for parameter in module.parameters()]
    kept = {one.data.untyped_storage()._cdata for one in parameters}
    state = [one.untyped_storage() for one in optimizer._tensors()]
    return {
        "offload_parameters": [one.data.untyped_storage() for one in parameters],
        "drop_gradients": [one.main_grad.untyped_storage() for one in parameters],
        "offload_optimizer": [one for one in state if one._cdata not in kept],
    }


def live(trainer, folder, order, releasing):
    """What is seen of each event; with `releasing` memory is given up in between, and is really gone."""
    life, seen = Life(trainer, folder).begin(), []
    for number, event in enumerate(order):
        if isinstance(event, MemoryConfig):
            if releasing:
                trainer.release(event)
                for name, found in storages(trainer).items():
                    assert found or name == "offload_optimizer"
                    assert not getattr(event, name) or not any(one.size() for one in found), name
        elif event == "resume":
            if releasing:
                trainer.resume()
                assert all(one.size() for found in storages(trainer).values() for one in found)
        else:
            seen.append((event, life.happen(number, event)))
    return seen


def live_twice(trainer, folder, order):
    return [live(trainer, f"{folder}/{releasing}", order, releasing) for releasing in (False, True)]


CASES = {
    "single-fp32": (DENSE, configuration()),
    "dp2-bf16-overlap": (DENSE, configuration(ParallelConfig(data=2), precision="bf16", megatron=OVERLAP)),
    "tp2": (DENSE, configuration(ParallelConfig(tensor=2))),
    "pp2-bf16-tied": (DENSE, configuration(ParallelConfig(pipeline=2), precision="bf16")),
    "pp2-vpp2-dp2-overlap": (
        DENSE,
        configuration(ParallelConfig(pipeline=2, virtual_pipeline=2, data=2), megatron=OVERLAP),
    ),
    "dp2-ep2": (EXPERTS, configuration(ParallelConfig(data=2, expert=2))),
    "pp2-dp2-ep2-bf16": (EXPERTS, configuration(ParallelConfig(pipeline=2, data=2, expert=2), precision="bf16")),
}
QUICK = {("single-fp32", 1), ("dp2-bf16-overlap", 2), ("dp2-ep2", 3)}
DRAWN = [
    pytest.param(case, seed, marks=[] if (case, seed) in QUICK else [pytest.mark.slow])
    for seed, case in [*enumerate(CASES, 10), *sorted((seed, case) for case, seed in QUICK)]
]


@pytest.mark.parametrize(("case", "seed"), DRAWN)
def test_giving_up_memory_changes_no_bit_in_any_order_of_events(folders, tmp_path, case, seed):
    family, settings = CASES[case]
    for kept, released in run_trainers(folders[family], settings, live_twice, str(tmp_path), list(events(seed))):
        assert [name for name, _ in kept] == [name for name, _ in released]
        for one, other in zip(kept, released, strict=True):
            assert other == one
        trained = [found for name, found in kept if name == "train"]
        assert all(found["grad_norm"] > 0 for found in trained)
