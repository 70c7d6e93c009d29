"""Weights that only the bridge's whole export converts: the bytes of the plain export."""

import re
from pathlib import Path

import pytest

from storage.errors import SyncMismatch
from tests.trainer_core.models import random_examples
from tests.trainer_core.ranks import run_trainers
from tests.trainer_core.weights.syncing import ARENA, Reading, oracle, sync
from trainer_core.config import ExpertsConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from trainer_core.weights.channel import Channel

EVERY = ["Auto", "ColumnParallel", "ConcatenatedQKV", "Direct", "GatedMLP", "QKV", "Replicated", "RowParallel"]


def configuration(family, precision="bf16", **parallel):
    return TrainerConfig(
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        experts=ExpertsConfig(bias_update_rate=0.01 if "deepseek" in family else 0.0),
        micro_batch_size=8,
        max_length=64,
        precision=precision,
    )


def unknown(*names):
    """Hide from now on that these mappings need no other rank."""
    from trainer_core.weights import mappings

    mappings.KNOWN = frozenset(kind for kind in mappings.KNOWN if kind.__name__.removesuffix("Mapping") not in names)


def by_the_bridge(trainer, folder, names):
    trainer.import_model()
    trainer.train_supervised(random_examples(), 1, 8)
    alone = sync(trainer, folder, 1)
    unknown(*names)
    return alone, sync(trainer, folder, 2), oracle(trainer, f"{folder}/oracle")


SOME, ALL = ["GatedMLP"], EVERY
LAYOUTS = {
    "pp2": {"pipeline": 2},
    "tp2": {"tensor": 2},
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "ep2": {"data": 2, "expert": 2},
    "pp2-dp2-ep2": {"pipeline": 2, "data": 2, "expert": 2},
    "pp2-vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "tp2-sp-ep2-etp1": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
}
QUICK = [
    ("deepseek-v3", "pp2", ALL),
]
SLOW = [
    ("deepseek-v3", "pp2-dp2-ep2", SOME),
    ("deepseek-v3", "pp2-dp2-ep2", ALL),
    ("qwen3-moe", "tp2-sp-ep2-etp1", ALL),
    ("qwen3-moe", "ep2", ALL),
    ("qwen2", "tp2", ALL),
    ("llama-tied", "tp2-pp2", ALL),
    ("llama-tied", "pp2-vpp2", ALL),
]


@pytest.mark.parametrize(
    ("family", "layout", "names"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda given: "" if isinstance(given, str) else "some" if given == SOME else "all",
)
def test_what_the_bridge_exports_arrives_with_the_same_bytes(folders, tmp_path, family, layout, names):
    given = configuration(family, **LAYOUTS[layout])
    ranks = run_trainers(folders(family), given, by_the_bridge, str(tmp_path), names)
    alone, exported, fresh = ranks[0]
    assert exported["received"] == alone["received"] == fresh
    assert exported["plan"].tensors != alone["plan"].tensors
    sent = [name for name in exported["sent"] if "gate_proj" in name]
    assert len(sent) == len([name for name in fresh if "gate_proj" in name])  # by rank 0, also those of other stages
    assert len({rank[1]["digest"] for rank in ranks}) == 1
    assert {rank[1]["exchanges"] for rank in ranks} == {1}


def fused(trainer, folder):
    """All experts of a layer become one tensor, as some checkpoints hold them."""
    from megatron.bridge.models.conversion.param_mapping import FusedExpertMapping
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge

    trainer.import_model()
    registry = Qwen3MoEBridge.mapping_registry

    def with_fused(bridge):
        found = registry(bridge)
        kept = [one for one in found.mappings if "experts" not in one.megatron_param or "fc2" not in one.megatron_param]
        name = "decoder.layers.*.mlp.experts.{}linear_fc2.weight{}"
        for given in (name.format("local_experts.*.", ""), name.format("", "*")):
            kept.append(FusedExpertMapping(given, "model.layers.*.mlp.experts.down_proj"))
        return type(found)(*kept)

    Qwen3MoEBridge.mapping_registry = with_fused
    return sync(trainer, folder, 1), oracle(trainer, f"{folder}/oracle")


def same_bytes(ranks):
    ours, fresh = ranks[0]
    return ours["received"] == fresh


@pytest.mark.slow
def test_experts_that_become_one_tensor(folders, tmp_path):
    given = configuration("qwen3-moe", pipeline=2, data=2, expert=2)
    ranks = run_trainers(folders("qwen3-moe"), given, fused, str(tmp_path))
    assert same_bytes(ranks)
    assert (4, 64, 32) in {shape for _, _, shape in ranks[0][0]["received"].values()}


def of_a_stored_state(trainer, folder):
    """Tensors that arrive of a state other than the live one, in its place, and then of the live one."""
    trainer.import_model()
    unknown(*EVERY)
    trainer.train_supervised(random_examples(), 1, 8)
    trainer.save(f"{folder}/state")
    stored = oracle(trainer, f"{folder}/stored")
    trainer.train_supervised(random_examples(), 1, 8)
    found = sync(trainer, folder, 1, stored=f"{folder}/state")
    live = sync(trainer, folder, 2)["received"] == oracle(trainer, f"{folder}/live") != stored
    return found, stored, live


@pytest.mark.slow
def test_weights_of_a_stored_state_are_exported_in_the_place_of_the_live_ones(folders, tmp_path):
    given = configuration("deepseek-v3", pipeline=2)
    ranks = run_trainers(folders("deepseek-v3"), given, of_a_stored_state, str(tmp_path))
    assert same_bytes([rank[:2] for rank in ranks])
    assert ranks[0][2]


def direct(trainer, folder, number, between=None):
    """Update without the code that restores biases to float32: the tensors on rank 0, or the failure here."""
    from trainer_core.weights.update import Update

    place = Path(folder, f"direct-{number}")
    place.mkdir(exist_ok=True)
    channel = Channel(transport="memory", folder=str(place), receivers=1, deadline_s=60)
    update = Update(trainer._model, trainer._mesh, trainer._config, number, ARENA)
    if between is not None:
        between()
    reading = Reading(channel, update.plan, None) if trainer._mesh.rank == 0 else None
    try:
        update.send(channel)
    except SyncMismatch as error:
        return str(error)
    finally:
        if reading is not None:
            reading.join(60)
    return None if reading is None else reading.found


def biases(trainer):
    return [
        module
        for chunk in trainer._model.modules
        for module in chunk.modules()
        if module._buffers.get("expert_bias") is not None
    ]


def cast(trainer, dtype):
    for module in biases(trainer):
        module.expert_bias.data = module.expert_bias.data.to(dtype)


def biases_change_their_type(trainer, folder):
    import torch

    trainer.import_model()
    unknown(*EVERY)
    cast(trainer, torch.bfloat16)  # a wrapper of low precision leaves them so
    first = direct(trainer, folder, 1)
    cast(trainer, torch.float32)  # the first forward pass does this
    second = direct(trainer, folder, 2)
    return first, second, oracle(trainer, f"{folder}/oracle")


def types_of_biases(found):
    return {dtype for name, (_, dtype, _) in found.items() if "e_score_correction_bias" in name}


@pytest.mark.slow
def test_nothing_that_was_planned_survives_an_update(folders, tmp_path):
    given = configuration("deepseek-v3", pipeline=2)
    first, second, fresh = run_trainers(folders("deepseek-v3"), given, biases_change_their_type, str(tmp_path))[0]
    assert types_of_biases(first) == {"bfloat16"}
    assert types_of_biases(second) == {"float32"}
    assert second == fresh


def changed_unseen(trainer, folder):
    """Change the biases of the last rank after the plan, which no rank looks at before it sends."""
    import torch

    def change():
        if trainer._mesh.rank == 1:
            cast(trainer, torch.float32)

    trainer.import_model()
    unknown(*EVERY)
    cast(trainer, torch.bfloat16)
    spoiled = direct(trainer, folder, 1, change)
    return spoiled, sync(trainer, folder, 2)["received"], oracle(trainer, f"{folder}/oracle")


@pytest.mark.slow
def test_a_weight_that_is_not_as_it_was_planned_fails_with_its_name_and_stops_no_rank(folders, tmp_path):
    given = configuration("deepseek-v3", pipeline=2)
    ranks = run_trainers(folders("deepseek-v3"), given, changed_unseen, str(tmp_path))
    assert "e_score_correction_bias is float32" in ranks[0][0]
    assert "planned as bfloat16" in ranks[0][0]
    assert ranks[0][1] == ranks[0][2]


def retyped(trainer):
    import torch

    if trainer._mesh.rank == 1:
        named = dict(trainer._model.modules[-1].named_parameters())
        norm = next(one for name, one in named.items() if name.endswith("final_layernorm.weight"))
        norm.data = norm.data.to(torch.float64)


def reconfigured(trainer):
    if trainer._mesh.rank == 0:
        trainer._model.config.layernorm_epsilon = 0.5


def changed_after_the_plan(trainer, folder, change):
    trainer.import_model()
    unknown(*EVERY)
    try:
        sync(trainer, folder, 1, between=lambda _: change(trainer))
    except SyncMismatch as error:
        return str(error)


@pytest.mark.parametrize(
    ("change", "rank", "said"),
    [
        (retyped, 1, r"final_layernorm\.weight.*float64"),
        (reconfigured, 0, r"configuration changed after the update was planned: plan"),
    ],
)
def test_what_changed_after_the_plan_is_told_before_a_byte_moves(folders, tmp_path, change, rank, said):
    given = configuration("llama", pipeline=2)
    found = run_trainers(folders("llama-tied"), given, changed_after_the_plan, str(tmp_path), change)
    assert re.search(said, found[rank])
    assert "another trainer rank" in found[1 - rank]
