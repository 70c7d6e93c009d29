"""Updates from layouts in which ranks hold unequal parts or divide sequences, and while memory is freed."""

import json
from pathlib import Path

import pytest

from storage.errors import InputError
from tests.trainer_core.models import random_examples, random_sequences
from tests.trainer_core.ranks import run_ranks, run_trainers
from tests.trainer_core.weights.syncing import imported, oracle, sync
from trainer_core.config import (
    ExpertsConfig,
    MegatronConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    RankSpec,
    TrainerConfig,
)

DEEPSEEK, EXPERTS = "deepseek-v3", "qwen3-moe"  # the first layer of the one is dense, and its routers have biases
FIRST = {"pipeline": 2, "layers_first_stage": 1}
LAST = {"pipeline": 2, "layers_last_stage": 1}
OVERLAP = MegatronConfig(overlap_grad_reduce=True, overlap_param_gather=True)
ALL = MemoryConfig(offload_parameters=True, drop_gradients=True, offload_optimizer=True)


def configuration(precision="bf16", megatron=None, **parallel):
    return TrainerConfig(
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        experts=ExpertsConfig(bias_update_rate=0.01),
        megatron=megatron or MegatronConfig(),
        micro_batch_size=8,
        max_length=64,
        precision=precision,
    )


def twice(trainer, folder):
    """Update before the first pass, and after a training; then export by the bridge."""
    trainer.import_model()
    first = sync(trainer, folder, 1)
    trainer.train_supervised(random_examples(), 1, 8)
    return first, sync(trainer, folder, 2), oracle(trainer, f"{folder}/exported")


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        (DEEPSEEK, FIRST),
        (DEEPSEEK, {"context": 2, "expert": 2}),
        pytest.param(EXPERTS, LAST, marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, {**LAST, "tensor": 2, "sequence": True}, marks=pytest.mark.slow),
        pytest.param(EXPERTS, {"context": 2, "pipeline": 2}, marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, {"context": 2, "tensor": 2, "sequence": True}, marks=pytest.mark.slow),
    ],
    ids=["first1", "cp2-ep2", "last1", "tp2-sp-last1", "cp2-pp2", "cp2-tp2-sp"],
)
def test_unequal_stages_and_divided_sequences_send_everything_once(folders, tmp_path, family, parallel):
    ranks = run_trainers(folders(family), configuration(**parallel), twice, str(tmp_path))
    first, second, exported = ranks[0]
    assert first["received"] == imported(folders(family), "bf16")
    assert second["received"] == exported
    moved = [name for name, before in first["received"].items() if exported[name] != before]
    assert len(moved) > len(exported) / 2
    for number, update in enumerate((first, second)):
        sent = [name for rank in ranks for name in rank[number]["sent"]]
        assert sorted(sent) == sorted(update["received"])
        assert {rank[number]["objects"] for rank in ranks} == {0}
        assert len({rank[number]["digest"] for rank in ranks}) == 1


def given_up(trainer, folder):
    """Tensors that arrive while weights are on the host, freed before the plan, after it, and before stored ones."""
    trainer.import_model()
    trainer.save(f"{folder}/state")
    stored = oracle(trainer, f"{folder}/of-the-state")
    trainer.logprobs(random_sequences())
    trainer.train_supervised(random_examples(), 1, 8)
    expected = oracle(trainer, f"{folder}/trained")
    found, away = {}, []

    def give_up(_trainer):
        away.append(trainer.release(ALL))

    give_up(trainer)
    found["before the plan"] = sync(trainer, folder, 1)["received"] == expected
    found["after the plan"] = sync(trainer, folder, 2, between=give_up)["received"] == expected
    give_up(trainer)
    found["stored"] = sync(trainer, folder, 3, between=give_up, stored=f"{folder}/state")["received"] == stored
    give_up(trainer)
    found["again"] = sync(trainer, folder, 4)["received"] == expected != stored
    return found, all(away)


@pytest.mark.parametrize(
    ("parallel", "megatron"),
    [
        ({"pipeline": 2}, None),
        pytest.param({"data": 2}, OVERLAP, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "data": 2, "expert": 2}, None, marks=pytest.mark.slow),
    ],
    ids=["pp2", "dp2-overlap", "pp2-dp2-ep2"],
)
def test_weights_that_were_given_up_arrive_all_the_same(folders, tmp_path, parallel, megatron):
    given = configuration(megatron=megatron, **parallel)
    ranks = run_trainers(folders(DEEPSEEK), given, given_up, str(tmp_path))
    found, _ = ranks[0]
    assert found == dict.fromkeys(found, True)
    assert all(away for _, away in ranks)


def refused(rank, world_size, store, directory):
    from trainer_core.start import start_trainer

    with pytest.raises(InputError) as caught:
        start_trainer(directory, configuration(), RankSpec(rank=rank, world_size=world_size, store=store))
    return str(caught.value)


def test_a_model_with_layers_that_predict_further_tokens_is_refused_by_the_trainer(folders, tmp_path):
    facts = json.loads(Path(folders(DEEPSEEK), "config.json").read_text())
    Path(tmp_path, "config.json").write_text(json.dumps(facts | {"num_nextn_predict_layers": 1}))
    (said,) = run_ranks(1, refused, str(tmp_path))
    assert "num_nextn_predict_layers = 1" in said
    assert "Set it to 0" in said
