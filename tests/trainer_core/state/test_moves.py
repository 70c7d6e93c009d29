"""A state moves between layouts: equal identity, equal weights, equal next update."""

import numpy as np
import pytest

from tests.trainer_core.models import make_family, random_samples, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig

pytestmark = pytest.mark.slow

SINGLE = ParallelConfig()
EP2 = ParallelConfig(data=2, expert=2)
CP2 = ParallelConfig(context=2)
UNEVEN = ParallelConfig(pipeline=2, layers_first_stage=3)
BY_HAND = pytest.mark.full  # CI has a move that both divisions of these have a part in
MOVES = [
    pytest.param("deepseek-v3", EP2, SINGLE, id="ep2-to-ep1", marks=BY_HAND),
    pytest.param(
        "qwen3-moe", SINGLE, ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=1), id="to-tp2-ep2-etp1"
    ),
    pytest.param(
        "qwen3-moe", ParallelConfig(tensor=2, sequence=True, data=2, expert=2),
        ParallelConfig(pipeline=2, virtual_pipeline=2), id="tp2-dp2-ep2-to-pp2-vpp2",
    ),
    pytest.param("deepseek-v3", EP2, ParallelConfig(pipeline=2), id="ep2-to-pp2", marks=BY_HAND),
    pytest.param("qwen3", CP2, SINGLE, id="cp2-to-cp1", marks=BY_HAND),
    pytest.param("qwen3", CP2, ParallelConfig(data=2), id="cp2-to-dp2"),
    pytest.param("qwen3", UNEVEN, ParallelConfig(pipeline=2), id="uneven-to-even", marks=BY_HAND),
    pytest.param("qwen3-moe", ParallelConfig(context=2, expert=2), UNEVEN, id="cp2-ep2-to-uneven"),
    pytest.param(
        "deepseek-v3", ParallelConfig(context=2, pipeline=2, layers_last_stage=1, expert=2),
        ParallelConfig(pipeline=2, virtual_pipeline=2), id="uneven-cp2-ep2-to-pp2-vpp2",
    ),
]  # fmt: skip


def configuration(parallel):
    return TrainerConfig(
        parallel=parallel, optimizer=OptimizerConfig(learning_rate=1e-3), policy=PolicyConfig(), max_length=64
    )


def save_and_go_on(trainer, folder):
    trainer.import_model()
    trainer.train_policy(random_samples(), 1.0)
    return saved_and_stepped(trainer, f"{folder}/state", f"{folder}/exports")


def load_and_go_on(trainer, folder, moved):
    trainer.load(f"{folder}/state")
    return saved_and_stepped(trainer, f"{moved}/state", f"{moved}/exports")


def saved_and_stepped(trainer, state, exports):
    identity = trainer.save(state).identity
    export(trainer, f"{exports}/before")
    trainer.train_policy(random_samples(1), 1.0)
    export(trainer, f"{exports}/after")
    return identity


@pytest.mark.parametrize(("family", "before", "after"), MOVES)
def test_a_state_moves_to_another_layout(tmp_path, family, before, after):
    model, first, second = (str(tmp_path / name) for name in ("model", "first", "second"))
    run_ranks(1, make_family, model, family)
    saved = run_trainers(model, configuration(before), save_and_go_on, first)[0]
    moved = run_trainers(model, configuration(after), load_and_go_on, first, second)[0]
    assert moved.tensors == saved.tensors  # weights, main weights and moments
    assert moved.progress == saved.progress
    if before.ranks == after.ranks:
        assert moved.generators == saved.generators  # to a state, all of these are the same ranks
    one, other = (read_export(f"{folder}/exports/before") for folder in (first, second))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    one, other = (read_export(f"{folder}/exports/after") for folder in (first, second))
    assert max(np.abs(one[name] - other[name]).max() for name in one) < 5e-6  # of an update of 1e-3
